"""A recipe is data: a format, block, rounding and transform for each of a layer's six operands.

y = x w (fprop), dx = g w^T (dgrad), dw = x^T g (wgrad). The NVFP4 recipe is that of arXiv
2509.25149.
"""

import dataclasses
import difflib

from .formats import BLOCK, Format


@dataclasses.dataclass(frozen=True)
class Operand:
    """How one operand of one GEMM is represented."""

    format: Format = Format.NVFP4
    # 16 x 16 blocks, the same for a matrix and its transpose; else 1 x 16 along the contraction.
    two_dimensional: bool = False
    stochastic: bool = False  # rounding of the codes; else nearest, ties to even
    hadamard: bool = False  # random Hadamard transform along the contraction before quantising

    def __post_init__(self) -> None:
        if self.format is not Format.NVFP4 and (self.two_dimensional or self.stochastic):
            raise ValueError(
                f"a {self.format.value} operand has no blocks and no stochastic rounding: use "
                "Format.NVFP4 or drop them"
            )

    @property
    def block(self) -> tuple[int, int]:
        return (BLOCK, BLOCK) if self.two_dimensional else (1, BLOCK)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The six operands of a linear layer's three GEMMs. Hashable: usable as a static argument."""

    name: str
    fprop_x: Operand
    fprop_w: Operand
    dgrad_g: Operand
    dgrad_w: Operand
    wgrad_x: Operand
    wgrad_g: Operand

    def __post_init__(self) -> None:
        for left, right in (("fprop_x", "fprop_w"), ("dgrad_g", "dgrad_w"), ("wgrad_x", "wgrad_g")):
            if getattr(self, left).hadamard != getattr(self, right).hadamard:
                raise ValueError(
                    f"recipe {self.name!r}: the Hadamard transform must be on both {left} and "
                    f"{right} or on neither: it cancels only in the product of the two"
                )
        for operand in ("fprop_x", "dgrad_g", "wgrad_x", "wgrad_g"):
            if getattr(self, operand).two_dimensional:
                raise ValueError(
                    f"recipe {self.name!r}: {operand} has {BLOCK} x {BLOCK} blocks, which are for "
                    "weights: a row of them would mix tokens; use 1 x 16"
                )
        for operand in ("fprop_x", "fprop_w"):
            if getattr(self, operand).stochastic:
                raise ValueError(
                    f"recipe {self.name!r}: {operand} is rounded stochastically, but the forward "
                    "pass has no rounding key: use nearest there"
                )

    @property
    def operands(self) -> tuple[Operand, ...]:
        """In the order of the fields."""
        return (self.fprop_x, self.fprop_w, self.dgrad_g, self.dgrad_w, self.wgrad_x, self.wgrad_g)

    @property
    def uses_fp4(self) -> bool:
        """Whether any operand is NVFP4: dimensions must then be multiples of 16."""
        return any(operand.format is Format.NVFP4 for operand in self.operands)

    @property
    def uses_stochastic_rounding(self) -> bool:
        """Whether gradients need a rounding key."""
        return any(operand.stochastic for operand in self.operands)

    @property
    def is_float32(self) -> bool:
        """Whether the layer is an ordinary float32 matmul."""
        return all(operand == Operand(Format.FP32) for operand in self.operands)

    @property
    def quantizes_weight_once(self) -> bool:
        """Whether dgrad uses the weight that fprop quantised (2D blocks survive the transpose)."""
        return self.dgrad_w == self.fprop_w and self.fprop_w.two_dimensional

    def with_high_precision_forward(self, format: Format = Format.BF16) -> "Recipe":
        """The recipe of the last part of a run: the forward GEMM in `format`, the others as before.

        It takes the paper's loss gap from 1.5 % to 0.5 % (arXiv 2509.25149, appendix D).
        """
        high = Operand(format)
        return dataclasses.replace(
            self, name=f"{self.name}-{format.value}-forward", fprop_x=high, fprop_w=high
        )


def nvfp4_recipe(
    *, hadamard: bool = True, stochastic_rounding: bool = True, two_dimensional_weights: bool = True
) -> Recipe:
    """NVIDIA's NVFP4 training recipe, or one without some of its parts."""
    weight = Operand(two_dimensional=two_dimensional_weights)
    parts = (
        ("-no-rht", hadamard),
        ("-no-sr", stochastic_rounding),
        ("-1d-weights", two_dimensional_weights),
    )
    return Recipe(
        name="nvfp4" + "".join(suffix for suffix, kept in parts if not kept),
        fprop_x=Operand(),
        fprop_w=weight,
        dgrad_g=Operand(stochastic=stochastic_rounding),
        dgrad_w=weight,
        wgrad_x=Operand(hadamard=hadamard),
        wgrad_g=Operand(hadamard=hadamard, stochastic=stochastic_rounding),
    )


def uniform_recipe(name: str, format: Format) -> Recipe:
    """All six operands in one high-precision format."""
    return Recipe(name, *[Operand(format)] * 6)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        nvfp4_recipe(),
        nvfp4_recipe(hadamard=False),
        nvfp4_recipe(stochastic_rounding=False),
        nvfp4_recipe(two_dimensional_weights=False),
        uniform_recipe("bf16", Format.BF16),
        uniform_recipe("fp16", Format.FP16),
        uniform_recipe("fp32", Format.FP32),
    )
}


def get_recipe(recipe: str | Recipe) -> Recipe:
    """A recipe by its name, or the recipe itself. Raises ValueError for an unknown name."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        near = difflib.get_close_matches(str(recipe), RECIPES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(RECIPES)}"
        raise ValueError(f"unknown recipe {recipe!r}: {hint}")
    return RECIPES[recipe]
