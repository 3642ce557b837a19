"""A vision transformer without a classifier; its weights have timm's names.

Dosovitskiy et al.: "An Image is Worth 16x16 Words" (2021); the small size is DeiT's (Touvron et al., 2021).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention over tokens ``(n, tokens, dim)``."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, dim = x.shape
        qkv = self.qkv(x).view(n, tokens, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(query, key, value)
        return self.proj(out.transpose(1, 2).reshape(n, tokens, dim))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Two layers with a GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then the MLP, each after a layer norm and with a shortcut."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Patches(nn.Module):
    """Images ``(n, 3, size, size)`` to tokens ``(n, (size / patch) ** 2, dim)``."""

    def __init__(self, patch: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).mT  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Images ``(n, 3, size, size)`` to features ``(n, dim)``: the class token after the last norm.

    Args:
        size: Height and width of the images.
        patch: Height and width of a patch; it divides ``size``.
        dim: Width of the tokens.
        depth: Number of blocks.
        heads: Attention heads; they divide ``dim``.
    """

    def __init__(self, size: int, patch: int, *, dim: int = 384, depth: int = 12, heads: int = 6) -> None:
        super().__init__()
        self.features = dim
        self.patch_embed = Patches(patch, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (size // patch) ** 2, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=1e-6)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch_embed(x)
        tokens = torch.cat((self.cls_token.expand(len(x), -1, -1), tokens), dim=1) + self.pos_embed
        return self.norm(self.blocks(tokens))[:, 0]  # type: ignore[no-any-return]
