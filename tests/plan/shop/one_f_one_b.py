"""A line of stages that run batches forward and backward in the order of 1F1B (Narayanan et al. 2019)."""


def one_f_one_b(times, stages, forward=1 / 3):
    """When the last stage ends; a batch takes `times[i]` on every stage, `forward` of it before it turns round."""
    count = len(times)
    orders = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, count)
        order = [("forward", batch) for batch in range(ahead)]
        for batch in range(count):
            if ahead + batch < count:
                order.append(("forward", ahead + batch))
            order.append(("backward", batch))
        orders.append(order)
    ends, free, at = {}, [0.0] * stages, [0] * stages
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                way, batch = orders[stage][at[stage]]
                before = stage - 1 if way == "forward" else stage + 1
                if way == "backward" and before == stages:
                    ready = ends["forward", batch, stage]
                elif before < 0:
                    ready = 0.0
                elif (way, batch, before) in ends:
                    ready = ends[way, batch, before]
                else:
                    break
                share = forward if way == "forward" else 1 - forward
                free[stage] = ends[way, batch, stage] = max(free[stage], ready) + share * times[batch]
                at[stage] += 1
    return max(free)
