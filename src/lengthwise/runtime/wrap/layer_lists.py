"""Find the layers of an ``nn.Module``: the modules of its longest list, or of several lists that belong together."""

from collections.abc import Iterator, Sequence

from torch import nn

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.forward_patch import defined_forward
from lengthwise.runtime.wrap.model_accessors import input_embeddings

Layers = Sequence[nn.Module]
"""The layers of a model, in order."""

_List = dict[str, nn.Module]
"""The modules of a list by their paths in the model; one that is there several times as often."""
PARTS = ".*"
"""At the end of a path: the modules that each layer there has."""
_HINT = "prepare(..., layers='transformer.blocks')"


def find_layers(
    model: nn.Module, *, name: str | None = None, of_any_class: bool = False
) -> tuple[str, list[tuple[str, nn.Module]]]:
    """Find a model's layers and their paths: the modules of the longest ``ModuleList`` of one class, or those ``name``
    says.

    Where no ``ModuleList`` can be meant, the longest ``Sequential`` or ``ModuleDict`` of modules of one class that have
    modules of their own, else attributes of one class, else all attributes. Lists of one length beside one another
    (attention in one, feed-forward in the other) are gone through together. A list or a module without a forward stands
    for its modules. Returns what is found by which path, too.

    Args:
        model: whose layers are asked for.
        name: the path of a container, or of a module that is the only layer; with ``.*`` at its end, the modules that
            each of these has are the layers. Several paths are told apart by commas.
        of_any_class: modules of a list may be of several classes, and of lists that are as long the last is taken.

    Raises:
        InputError: there is none, or several are as long.
    """
    if name is not None:
        return name, _called_together([_named(model, part.strip()) for part in name.split(",")])
    outer = _without_towers(model, _candidates(model, of_any_class=of_any_class))
    if not outer:
        raise InputError(
            f"{type(model).__name__} has no nn.ModuleList, nn.Sequential or nn.ModuleDict of modules of one class, nor "
            "attributes that have modules themselves, so its layers are not known; put them into a list, or name a "
            f"container of several classes, or a module that is the only layer: {_HINT}"
        )
    longest = max(len(modules) for modules in outer.values())
    names = _nearest_to_tokens(model, [path for path, modules in outer.items() if len(modules) == longest])
    if len(names) > 1 and not of_any_class:
        if around := _list_around(model, names):
            return around, _called(_containers(model, nn.ModuleList)[around])
        if len({path.rpartition(".")[0] for path in names}) == 1:
            return ",".join(_path_of(path, outer) for path in names), _called_together([outer[path] for path in names])
        listed = " and ".join(names)
        raise InputError(f"{listed} have {longest} layers each; say which: prepare(..., layers={names[0]!r})")
    return _path_of(names[-1], outer), _called(outer[names[-1]])


def _path_of(name: str, lists: dict[str, _List]) -> str:
    """The path of a list; of attributes, the paths of all of them."""
    modules = lists[name]
    return ",".join(modules) if name in modules else name


def other_lists(model: nn.Module, taken: str) -> list[str]:
    """The paths of other lists that may be the layers than those that were ``taken``, the longest first; last of all,
    of all attributes that have modules.
    """
    lists = _containers(model, nn.ModuleList, nn.Sequential, nn.ModuleDict)
    lists = {**_outermost(lists, are_nested=True), **_attributes_of_one_class(model)}
    paths = [_path_of(name, lists) for name in sorted(lists, key=lambda name: -len(lists[name]))]
    paths += [",".join(modules) for modules in _attributes(model).values()]
    return [path for path in paths if path != taken and path not in taken.split(",")]


def parts_of_layers(model: nn.Module, name: str) -> str | None:
    """The name of the modules that layers of a name have themselves; None: they have none, or are parts already."""
    if name.endswith(PARTS) or not any(list(layer.children()) for _, layer in find_layers(model, name=name)[1]):
        return None
    return ",".join(f"{path}{PARTS}" for path in name.split(","))


def _named(model: nn.Module, name: str) -> _List:
    """The modules of a container, or the module itself; with ``.*`` at the end of its path, the modules of these."""
    path, modules = name.removesuffix(PARTS), dict(model.named_modules(remove_duplicate=False))
    named = modules.get(path) if path else None
    listed = {} if named is None else _modules_in(path, named) if _is_container(named) else {path: named}
    if path != name:
        listed = {inner: part for path, module in listed.items() for inner, part in _modules_in(path, module).items()}
    if not listed:
        lists = ", ".join(_containers(model, nn.ModuleList, nn.Sequential, nn.ModuleDict)) or "none"
        raise InputError(f"{type(model).__name__} has no layers in {name!r}; it has: {lists}")
    return listed


def _called(modules: _List) -> list[tuple[str, nn.Module]]:
    return [layer for path, module in modules.items() for layer in _with_forward(path, module)]


def _called_together(lists: list[_List]) -> list[tuple[str, nn.Module]]:
    """The modules of several lists: by turns where each list has as many of another class, else end to end."""
    forms = [(len(modules), {type(module) for module in modules.values()}) for modules in lists]
    if len({length for length, _ in forms}) > 1 or all(form == forms[0] for form in forms):
        return [layer for modules in lists for layer in _called(modules)]
    return [layer for row in zip(*(modules.items() for modules in lists)) for layer in _called(dict(row))]


def _with_forward(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A module, or those that it stands for if it cannot be called itself."""
    parts = _modules_in(path, module)
    if defined_forward(type(module)) is not defined_forward(nn.Module) or "forward" in vars(module) or not parts:
        yield path, module
        return
    for inner, part in parts.items():
        yield from _with_forward(inner, part)


def _list_around(model: nn.Module, names: list[str]) -> str | None:
    """The outermost list that several lists are all parts of, such as adapters of layers of several classes."""
    lists = _containers(model, nn.ModuleList)
    return next((outer for outer in lists if all(name.startswith(f"{outer}.") for name in names)), None)


def _candidates(model: nn.Module, *, of_any_class: bool) -> dict[str, _List]:
    """The outermost lists that may be the layers, by name: of those that are likeliest."""
    lists = _containers(model, nn.ModuleList)
    equal, equal_others = _of_one_class(lists), _of_one_class(_containers(model, nn.Sequential, nn.ModuleDict))
    attributes = _attributes_of_one_class(model)
    if of_any_class:
        return (
            _outermost(lists, are_nested=True)
            or _outermost(lists)
            or _outermost(equal_others, are_nested=True)
            or attributes
            or _attributes(model)
        )
    return (
        _outermost(equal, are_nested=True)
        or _outermost(lists, are_nested=True)
        or _outermost(equal_others, are_nested=True)
        or _outermost(equal)
        or attributes
        or _attributes(model)
    )


def _of_one_class(lists: dict[str, _List]) -> dict[str, _List]:
    return {name: modules for name, modules in lists.items() if len({type(m) for m in modules.values()}) == 1}


def _outermost(lists: dict[str, _List], *, are_nested: bool = False) -> dict[str, _List]:
    """Keep lists that are in no other; with ``are_nested``, of those whose first module has modules of its own."""
    return {
        name: modules
        for name, modules in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists if other != name)
        and (not are_nested or next(next(iter(modules.values())).children(), None) is not None)
    }


def _containers(model: nn.Module, *kinds: type[nn.Module]) -> dict[str, _List]:
    lists = {name: _modules_in(name, module) for name, module in model.named_modules() if isinstance(module, kinds)}
    return {name: modules for name, modules in lists.items() if modules}


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)


def _modules_in(name: str, module: nn.Module) -> _List:
    """The modules that one has, and their paths; those that are None are left out."""
    prefix = f"{name}." if name else ""
    return {f"{prefix}{inner}": part for inner, part in module._modules.items() if part is not None}


def _attributes_of_one_class(model: nn.Module, name: str = "") -> dict[str, _List]:
    """Attributes of a module of one class with modules, two or more, by the path of the first; none inside of them."""
    lists, of_class = dict[str, _List](), dict[type[nn.Module], _List]()
    for path, part in _modules_in(name, model).items():
        if next(part.children(), None) is not None and not _is_container(part):
            of_class.setdefault(type(part), {})[path] = part
    for modules in of_class.values():
        path, part = next(iter(modules.items()))
        lists |= {path: modules} if len(modules) > 1 else _attributes_of_one_class(part, path)
    return lists


def _attributes(model: nn.Module, name: str = "") -> dict[str, _List]:
    """The attributes that have modules themselves, such as an only layer; of what holds the embedding, if one does."""
    parts = {path: part for path, part in _modules_in(name, model).items() if next(part.children(), None) is not None}
    for path, part in parts.items():
        if any(isinstance(module, nn.Embedding) for module in part.modules()) and (inner := _attributes(part, path)):
            return inner
    return {next(iter(parts)): parts} if parts else {}


def _without_towers(model: nn.Module, outer: dict[str, _List]) -> dict[str, _List]:
    """Leave out lists in other models of transformers than the one that embeds tokens, such as towers for images."""
    embedding = input_embeddings(model)
    parts = {name: part for name, part in model.named_modules() if name and hasattr(part, "set_attn_implementation")}
    towers = [name for name, part in parts.items() if all(module is not embedding for module in part.modules())]
    rest = {
        name: modules for name, modules in outer.items() if not any(name.startswith(f"{tower}.") for tower in towers)
    }
    return rest if embedding is not None and rest else outer


def _nearest_to_tokens(model: nn.Module, names: list[str]) -> list[str]:
    """Keep the layer lists that are nearest to the token embedding; others belong to image towers, say."""
    embedding = input_embeddings(model)
    home = next((name for name, module in model.named_modules() if module is embedding), None)
    if home is None or len(names) < 2:
        return names
    shared = {name: _num_shared(name.split("."), home.split(".")) for name in names}
    names = [name for name in names if shared[name] == max(shared.values())]
    depths = {name: name.count(".") for name in names}
    return [name for name in names if depths[name] == min(depths.values())]


def _num_shared(first: list[str], second: list[str]) -> int:
    """The number of leading parts that two paths share."""
    return next((depth for depth, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
