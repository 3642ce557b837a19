"""ResNet-18 and ResNet-50 without a classifier, with torchvision's names and initialisation.

He, Zhang, Ren, Sun: "Deep Residual Learning for Image Recognition" (2016). The stride of a bottleneck is in its
3 x 3 convolution, as in torchvision.
"""

from typing import Literal

from torch import Tensor, nn

Stem = Literal["cifar", "imagenet"]


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """A projection of a block's input to the shape of its output; None if they have the same shape."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut; the last has four times the channels."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """Images ``(n, 3, size, size)`` to features ``(n, features)``: the mean over the last map.

    Args:
        block: :class:`BasicBlock` or :class:`Bottleneck`.
        depths: Blocks in each of the four stages.
        stem: ``"cifar"`` starts with a 3 x 3 convolution at full size, ``"imagenet"`` with a 7 x 7 one of stride 2
            and a max-pool.
        width: Channels of the first stage; each further stage has twice as many.
    """

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        depths: tuple[int, int, int, int],
        *,
        stem: Stem,
        width: int = 64,
    ) -> None:
        super().__init__()
        small = stem == "cifar"
        self.conv1 = conv(3, width, 3) if small else conv(3, width, 7, 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        inputs = width
        for stage, depth in enumerate(depths):
            channels = width * 2**stage
            blocks = []
            for index in range(depth):
                blocks.append(block(inputs, channels, 2 if stage and not index else 1))
                inputs = channels * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.features = inputs
        for module in self.modules():  # batch norms already start at 1 and 0
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return x.mean(dim=(2, 3))
