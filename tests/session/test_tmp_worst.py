import json, time
from tests.session.test_objectives import *
import pytest
WORST = {}
@pytest.mark.parametrize("num_ranks,weights", [(1,"whole"),(2,"whole"),(3,"whole"),(4,"whole"),(2,"by-layer"),(3,"by-layer"),(4,"by-layer")])
def test_worst(ranks, num_ranks, weights):
    names = [n for n in OBJECTIVES if weights == "whole" or n != "all of a teacher"]
    count = 0
    seeds = range(100, 300) if weights == "whole" else range(100, 170)
    for first in range(0, len(seeds), 10):
        part = seeds[first:first+10]
        cases = [(n, s % NUM_BATCHES, s) for n in names for s in part]
        global EXPECTED
        expected = {(n, b): step_alone(n, b) for n, b, _ in cases}
        options = {} if weights == "whole" else {"weights": weights}
        for errors, _ in ranks(num_ranks).run(gradient_errors, cases, expected, **options):
            for e, n, *rest in errors:
                key = f"{n} on {num_ranks} {weights}"
                WORST[key] = max(WORST.get(key, (0,0)), (e, str(rest)))
        count += len(cases)
        open("/tmp/objectives_worst.json","w").write(json.dumps({"done": f"{num_ranks} {weights} {count}", "worst": WORST}))
    assert max(v[0] for v in WORST.values()) <= 1e-10, max(WORST.items(), key=lambda kv: kv[1][0])
