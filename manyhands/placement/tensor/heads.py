"""`nn.MultiheadAttention` by heads: each worker computes some of them, and what they give is added up.

PyTorch's own pass wants the projections whole, so another takes its place. It does the same on the heads that are here.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.errors import UsageError
from manyhands.placement.model_parallel import MemberGroup, Sliced
from manyhands.placement.tensor.crossing import Copy, Gather, SumAcross, edges
from manyhands.placement.tensor.divided import DividedPass
from manyhands.replica.state.slice_of import TensorSlice

# Along which dimension a parameter is cut, and how many tensors it holds one after the other.
_CUTS = {
    "in_proj_weight": (0, 3),
    "in_proj_bias": (0, 3),
    "q_proj_weight": (0, 1),
    "k_proj_weight": (0, 1),
    "v_proj_weight": (0, 1),
    "bias_k": (2, 1),
    "bias_v": (2, 1),
    "out_proj.weight": (1, 1),
}


def share_heads(module: nn.MultiheadAttention, ways: int, way: int, sliced: Sliced) -> None:
    """Give every worker as many heads; what is added after the sum stays whole."""
    limits = edges(module.embed_dim, ways)
    cut: list[Tensor] = []
    for name, param in module.named_parameters():
        if name in _CUTS:
            dim, blocks = _CUTS[name]
            sliced.pieces[id(param)] = TensorSlice(
                shape=tuple(param.shape),
                cut=True,
                dim=dim,
                start=limits[way],
                stop=limits[way + 1],
                blocks=blocks,
            )
            cut.append(param)
    sliced.passes.append(HeadsPass(module, cut, sliced.members))


class HeadsPass(DividedPass):
    """Some of the heads."""

    module: nn.MultiheadAttention

    def __init__(self, module: nn.MultiheadAttention, used: list[Tensor], members: MemberGroup) -> None:
        self._members = members
        super().__init__(module, used)

    def compute(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`."""
        module, comm = self.module, self._members.comm
        if query.is_nested:
            raise UsageError(
                "attention that is divided by heads takes no nested tensors; make nn.TransformerEncoder with "
                "enable_nested_tensor=False, or keep the layer whole, tensor:whole=…"
            )
        if is_causal and attn_mask is None:
            raise UsageError("is_causal is a hint about attn_mask, which must be given with it")
        is_batched = query.dim() == 3
        inputs = self._copied(query, key, value)
        if not is_batched:
            inputs = [each.unsqueeze(0) for each in inputs]
        elif not module.batch_first:
            inputs = [each.transpose(0, 1) for each in inputs]
        q, k, v = self._projected(inputs)
        samples, _, length, width = q.shape
        mask = self._mask(attn_mask, key_padding_mask, samples, length, k.shape[2], q.dtype)
        drop = module.dropout if module.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = (q * width**-0.5) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), drop)
            seen = weights @ v
        else:
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop)
        part = F.linear(seen.transpose(1, 2).flatten(2), module.out_proj.weight)
        result: Tensor = SumAcross.apply(part, comm)  # type: ignore[no-untyped-call]
        if module.out_proj.bias is not None:
            result = result + module.out_proj.bias.to(result.dtype)
        if weights is not None and average_attn_weights:
            weights = SumAcross.apply(weights.sum(1), comm) / module.num_heads  # type: ignore[no-untyped-call]
        elif weights is not None:
            limits = edges(module.num_heads, comm.size)
            weights = Gather.apply(weights, 1, limits, comm)  # type: ignore[no-untyped-call]
        if not is_batched:
            return result.squeeze(0), None if weights is None else weights.squeeze(0)
        return (result if module.batch_first else result.transpose(0, 1)), weights

    def _copied(self, *inputs: Tensor) -> list[Tensor]:
        """The same values for all heads; of those that are one tensor, gradients are added up once."""
        known: dict[int, Any] = {}
        for each in inputs:
            if id(each) not in known:
                known[id(each)] = Copy.apply(each, self._members.comm) if each.requires_grad else each  # type: ignore[no-untyped-call]
        return [known[id(each)] for each in inputs]

    def _projected(self, inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the heads that are here, with what is added to the sequences."""
        module = self.module
        if module.in_proj_weight is not None:
            matrices = module.in_proj_weight.chunk(3)
        else:
            matrices = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        q, k, v = (F.linear(*each) for each in zip(inputs, matrices, biases, strict=True))
        if module.bias_k is not None and module.bias_v is not None:
            k = torch.cat([k, module.bias_k.expand(len(k), 1, -1)], dim=1)
            v = torch.cat([v, module.bias_v.expand(len(v), 1, -1)], dim=1)
        if module.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        q, k, v = (each.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for each in (q, k, v))
        return q, k, v

    def _mask(
        self,
        attention: Tensor | None,
        padding: Tensor | None,
        samples: int,
        length: int,
        sources: int,
        dtype: torch.dtype,
    ) -> Tensor | None:
        """What is added to the scores; nothing to those of what was added to the sequences."""
        masks = []
        if attention is not None:
            mask = _added(attention, dtype)
            if mask.dim() == 3:  # one for each head
                limits, way = edges(self.module.num_heads, self._members.comm.size), self._members.comm.rank
                mask = mask.unflatten(0, (samples, -1))[:, limits[way] : limits[way + 1]]
            masks.append(mask if mask.dim() == 4 else mask[None, None])
        if padding is not None:
            masks.append(_added(padding, dtype).view(samples, 1, 1, -1))
        if not masks:
            return None
        mask = masks[0] if len(masks) == 1 else masks[0] + masks[1]
        return F.pad(mask, (0, sources - mask.shape[-1])).expand(samples, -1, length, -1)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of truth values as what is added to scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
