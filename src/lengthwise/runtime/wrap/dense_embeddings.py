"""Gradients of ``nn.Embedding(sparse=True)`` made dense: those of all ranks are summed where every row is."""

from torch import nn


class DenseEmbeddings:
    """Lets the embeddings of a model make dense gradients, of the same numbers, until it is released."""

    def __init__(self, model: nn.Module) -> None:
        kinds = (nn.Embedding, nn.EmbeddingBag)
        self._modules = [module for module in model.modules() if isinstance(module, kinds) and module.sparse]
        for module in self._modules:
            module.sparse = False

    def release(self) -> None:
        """Let them make sparse ones again."""
        for module in self._modules:
            module.sparse = True
