"""What a configured training run computes and plans with: its engine, batches, planner and validation."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from lengthwise.config.run_config import Config
from lengthwise.core.batch import BatchStream, GlobalBatch
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.data.corpus import Corpus
from lengthwise.models.stock_model import StockModel
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.train.training_engine import PeekPlan, TrainingEngine
from lengthwise.runtime.train.validation import Validation
from lengthwise.session.validation_set import PlannerOf, validation_plans


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What a run is made of on one rank, whichever engine computes it."""

    config: Config
    corpus: Corpus
    validation: Corpus | None
    cluster: ClusterSpec
    world: DistContext
    folder: RunFolder
    quiet: bool = False
    on_size: Callable[[int, int], None] | None = None
    """Called with how many sizes are compiled, of how many."""

    def validate_with(self, planner_of: PlannerOf) -> Validation | None:
        """The validation of the run, planned by ``planner_of``; None: it has none."""
        train, corpus = self.config.train, self.validation
        if corpus is None:
            return None
        plans = validation_plans(self.config, corpus, planner_of)
        return Validation(
            plans=plans, source=corpus, digest=corpus.digest, every=train.validate_every, patience=train.patience
        )


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """What the training loop of a run uses."""

    engine: TrainingEngine
    stream: BatchStream
    planner: Callable[[GlobalBatch], StepPlan]
    num_params: int
    spec: ModelSpec | None
    """Sizes of the model; None: its family has none that FLOPs are counted by."""
    validation: Validation | None = None
    is_measured: bool
    """Whether costs are measured ones; else data sheets."""
    peek: PeekPlan | None = None
    """None: plans are not known before their step."""
    close: Callable[[], object] = lambda: None
    """Ends processes that plan."""


def model_document(spec: ModelSpec | StockModel, parts: RunParts) -> dict[str, Any]:
    """What model.json says of the model; ``architecture`` is there where transformers computes it."""
    sizes = {} if parts.spec is None else asdict(parts.spec)
    names = {} if isinstance(spec, ModelSpec) else {"name": spec.name, "architecture": spec.architecture}
    return {**sizes, **names, "num_params": parts.num_params, "digest": spec.digest}
