"""Models of users who make their positions in odd ways, or what looks like positions and is none."""

import torch
from torch.nn import functional as F

from tests.session.structures import Plain


class ManyForms(Plain):
    """Positions of nearly every kind, and numbers that only look like them."""

    def embed(self, idx):
        parts = (self.from_one, self.from_two, self.narrowed, self.cut_later, self.of_ones, self.of_list, self.data)
        parts = (*parts, self.of_other_forms)
        return self.of_floats(self.tokens(idx) + sum(part(idx) for part in parts))

    def from_one(self, idx):
        return self.places(torch.arange(1, idx.shape[1] + 1, device=idx.device))

    def from_two(self, idx):
        """Positions beside those of chunks: as many calls as there are chunks."""
        n = idx.shape[1]
        chunks = [self.places(counted(start, min(start + 4, n)) % 8) * 0.0 for start in range(1, n, 4)]
        return self.places(torch.arange(start=2, end=2 + n)) + sum(x.sum() for x in chunks)

    def narrowed(self, idx):
        return self.places.weight.narrow(0, 0, idx.shape[1]) + torch.narrow(self.places.weight, -2, 3, idx.shape[1])

    def cut_later(self, idx):
        return self.places.weight[None, 2 : 2 + idx.shape[1]]

    def of_other_forms(self, idx):
        """The first rows of tables in another dtype or form."""
        n, table = idx.shape[1], self.places.weight
        rows = table.to(torch.float32)[:n].double() + table.detach().clone()[1 : n + 1] + table.unsqueeze(0)[:, :n]
        return rows + table.T[:, :n].t() + table.view(1, -1, 2, 8).transpose(1, 2)[:, :, :n].transpose(1, 2).flatten(2)

    def of_ones(self, idx):
        """The positions of a mask of ones, as models of transformers count those."""
        mask = torch.ones(idx.shape, dtype=torch.int32)
        first, second = mask.long().cumsum(-1) - 1, torch.cumsum(torch.ones_like(idx, dtype=torch.float64), dim=1)
        return self.places(first) * second[..., None].rsqrt()

    def of_list(self, idx):
        n = idx.shape[1]
        return self.places(torch.tensor(list(range(n)))) + self.places(torch.tensor(range(1, n + 1)))

    def data(self, idx):
        """Eleven numbers, and seven: a sequence that is traced has as many slots."""
        data = torch.arange(2, 13), torch.arange(2, 9), torch.tensor(list(range(11))), torch.ones(11).cumsum(0).long()
        return sum(self.places(some).mean(0) for some in (*data, torch.arange(3, 24)))

    def of_floats(self, x):
        """Tokens scaled by the logarithm of their position, over as many as came before."""
        counts = torch.arange(1.0, x.shape[1] + 1, 1)[:, None]
        assert counts.dtype == torch.get_default_dtype()
        return x * counts.double().log1p() / counts


def counted(start, end):
    return torch.arange(start, end)


class SumsOfData(Plain):
    """Positions among tokens that are no padding: of ones that were changed."""

    def embed(self, idx):
        kept = torch.ones_like(idx)
        kept[idx < 20] = 0
        return self.tokens(idx) + self.places(kept.cumsum(1))


class UpToTwelve(Plain):
    """Twelve positions at most: as many as there are slots in the sequences that are traced."""

    def embed(self, idx):
        n = idx.shape[1]
        some = self.places(torch.arange(1, min(n, 12) + 1))
        return self.tokens(idx) + F.pad(some, (0, 0, 0, n - len(some)))
