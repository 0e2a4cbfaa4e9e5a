"use strict";
(() => {
  const make = (tag, words) => Object.assign(document.createElement(tag), {textContent: words});
  const button = (words, act) => {
    const one = make("button", words);
    one.type = "button";
    one.addEventListener("click", act);
    return one;
  };

  // Zoom: a timeline's inner drawing shows part of its width, and its labels move along.
  for (const plot of document.querySelectorAll(".plot")) {
    const chart = plot.querySelector("svg[data-end]"), inner = chart && chart.querySelector("svg");
    if (!inner) continue;
    const whole = inner.viewBox.baseVal.width, end = Number(chart.dataset.end);
    const ticks = [...chart.querySelectorAll("[data-at]")];
    let left = 0, width = 1;
    const told = make("span", ""), pointed = make("span", "");
    told.setAttribute("aria-live", "polite");
    const show = (start, share) => {
      width = Math.min(1, Math.max(1e-4, share));
      left = Math.min(1 - width, Math.max(0, start));
      inner.setAttribute("viewBox", `${left * whole} 0 ${width * whole} ${inner.viewBox.baseVal.height}`);
      for (const tick of ticks) {
        const at = (Number(tick.dataset.at) - left) / width;
        tick.setAttribute("x", `${100 * at}%`);
        tick.setAttribute("visibility", at >= 0 && at <= 1 ? "visible" : "hidden");
      }
      const from = (left * end).toPrecision(3), to = ((left + width) * end).toPrecision(3);
      told.textContent = width < 1 ? `${from} s to ${to} s` : "";
    };
    const bar = make("p", "");
    bar.className = "controls";
    bar.append(
      button("Zoom in", () => show(left + width / 4, width / 2)),
      button("Zoom out", () => show(left - width / 2, width * 2)),
      button("Earlier", () => show(left - width / 2, width)),
      button("Later", () => show(left + width / 2, width)),
      button("Whole step", () => show(0, 1)), told, pointed);
    plot.after(bar);
    const at = (event) => {
      const box = chart.getBoundingClientRect();
      return left + width * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    };
    chart.addEventListener("pointermove", (event) => { pointed.textContent = `${(at(event) * end).toPrecision(4)} s`; });
    let from = null;
    chart.addEventListener("pointerdown", (event) => { from = at(event); });
    chart.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const to = at(event);
      if (Math.abs(to - from) > width / 100) show(Math.min(from, to), Math.abs(to - from));
      from = null;
    });
    chart.addEventListener("dblclick", () => show(0, 1));
  }

  // Step picker: of the further steps, one is shown.
  for (const box of document.querySelectorAll(".steps")) {
    const steps = [...box.querySelectorAll("[data-step]")], select = make("select", "");
    const pick = () => { for (const one of steps) one.hidden = one.dataset.step !== select.value; };
    select.append(...steps.map((one) => make("option", one.dataset.step)));
    select.setAttribute("aria-label", "Step");
    select.addEventListener("change", pick);
    box.firstElementChild.after(select);
    pick();
  }

  // Policy picker: what belongs to a policy that is not chosen is hidden.
  const marked = [...document.querySelectorAll("[data-policy]")];
  const names = [...new Set(marked.map((one) => one.dataset.policy))];
  if (names.length > 1) {
    const box = make("fieldset", "");
    box.className = "controls";
    box.append(make("legend", "Show"));
    for (const name of names) {
      const label = make("label", ""), input = make("input", "");
      input.type = "checkbox";
      input.checked = true;
      input.addEventListener("change", () => {
        for (const one of marked) if (one.dataset.policy === name) one.hidden = !input.checked;
      });
      label.append(input, ` ${name}`);
      box.append(label);
    }
    document.querySelector("header").after(box);
  }
})();
