"""Which projections of which blocks train in FP4, decided once and shown to the user."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ..errors import UserError, check_choice
from ..numerics import Choice, LinearSizes, Recipe, choose_backend, get_recipe
from ..numerics.formats import BLOCK
from .config import ModelConfig

ROUTER = "router"  # the linear that is FP32 whatever the recipe
logger = logging.getLogger("fp4zoo")

# Share of the blocks kept in BF16 at either end when a rule gives no number: 2 and 8 of 62, as in
# the 12-billion-parameter run of arXiv 2509.25149.
FIRST_FRACTION = 0.03
LAST_FRACTION = 0.13


@dataclass(frozen=True)
class PrecisionRules:
    """Which linears of an FP4 recipe are really FP4. The rest of the blocks' linears are BF16.

    Attributes:
      first_blocks: blocks at the start that stay BF16; null means 3 % of them, rounded, and at
        least one in a model of eight blocks or more.
      last_blocks: blocks at the end that stay BF16; null means 13 % of them, rounded, and at least
        one in a model of four blocks or more.
      attention: whether the attention projections of the other blocks are FP4.
      mlp: whether the feed-forward of the other blocks is FP4.
      on_unsupported: what to do with projections that the backend cannot run in FP4, such as ones
        whose dimensions blocks of 16 do not divide: "error" stops, "bf16" says so and leaves them
        BF16.
    """

    first_blocks: int | None = None
    last_blocks: int | None = None
    attention: bool = True
    mlp: bool = True
    on_unsupported: Literal["error", "bf16"] = "error"

    def __post_init__(self) -> None:
        check_choice("precision.rules.on_unsupported", self.on_unsupported, ("error", "bf16"))
        for name in ("first_blocks", "last_blocks"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UserError(f"precision.rules.{name}={value} must be 0 or more, or null")

    def block_counts(self, num_layers: int) -> tuple[int, int]:
        """Number of BF16 blocks at the start and at the end of a model of `num_layers` blocks.

        Raises:
          UserError: more BF16 blocks than blocks.
        """
        first, last = self.first_blocks, self.last_blocks
        if first is None:
            first = max(int(FIRST_FRACTION * num_layers + 0.5), 1 if num_layers >= 8 else 0)
        if last is None:
            last = max(int(LAST_FRACTION * num_layers + 0.5), 1 if num_layers >= 4 else 0)
        if first + last > num_layers:
            raise UserError(
                f"precision.rules.first_blocks={first} and last_blocks={last} exceed "
                f"model.num_layers={num_layers}; lower them"
            )
        return first, last


# Where each FP4 linear of a block runs: (path, choice) pairs. Hashable, as NNX attributes are.
LinearBackends = tuple[tuple[str, Choice], ...]


class LinearShape(NamedTuple):
    """One linear of a block: `copies` matrices [in, out], of which a token uses `active`."""

    name: str
    in_features: int
    out_features: int
    copies: int = 1
    active: int = 1

    @property
    def parameters(self) -> int:
        return self.in_features * self.out_features * self.copies

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward product, per token."""
        return 2 * self.in_features * self.out_features * self.active


class Segment(NamedTuple):
    """Blocks [start, stop) that share their precision and so run under one scan."""

    name: str
    start: int
    stop: int
    attention: Recipe
    mlp: Recipe


class PrecisionRow(NamedTuple):
    """One line of the plan; shares are fractions of all linears, the output head included."""

    path: str
    precision: str
    uses_fp4: bool
    parameters: int
    parameter_share: float
    flops_share: float


def fit_rules(rules: PrecisionRules, recipe: Recipe | str, config: ModelConfig) -> PrecisionRules:
    """The rules as far as the model's dimensions allow them, `on_unsupported` applied.

    Raises:
      UserError: blocks of 16 do not divide a dimension and the rules say "error".
    """
    recipe = get_recipe(recipe)
    sizes = {
        "attention": {"embed_dim": config.embed_dim, "head_dim": config.resolved_head_dim},
        "mlp": {"embed_dim": config.embed_dim, "mlp_dim": config.mlp_dim},
    }
    for group, dimensions in sizes.items():
        for name, size in dimensions.items():
            if not (recipe.uses_fp4 and getattr(rules, group) and size % BLOCK):
                continue
            fault = (
                f"model.{name}={size} is not a multiple of {BLOCK}, which {recipe.name} needs in "
                f"{group} projections"
            )
            if rules.on_unsupported == "error":
                raise UserError(
                    f"{fault}: use {size + -size % BLOCK}, precision.rules.{group}=false, or "
                    "precision.rules.on_unsupported=bf16"
                )
            logger.warning("%s: they run in bf16", fault)
            rules = replace(rules, **{group: False})
    return rules


def fit_backend(
    rules: PrecisionRules,
    recipe: Recipe | str,
    backend: str,
    linears: Mapping[str, tuple[LinearShape, ...]],
    in_tiles: bool,
) -> tuple[PrecisionRules, LinearBackends]:
    """The rules as far as the backend can follow them, and where each FP4 linear then runs.

    linears: of one block, by "attention" and "mlp". in_tiles: whether the feed-forward is a
    dropless mixture of experts.

    Raises:
      UserError: `backend` cannot run a linear and the rules say "error".
    """
    recipe = get_recipe(recipe)
    choices: dict[str, Choice] = {}
    for group, shapes in linears.items():
        if not (recipe.uses_fp4 and getattr(rules, group)):
            continue
        found = {}
        for shape in (shape for shape in shapes if shape.name != ROUTER):
            path = f"{group}.{shape.name}"
            sizes = LinearSizes(
                shape.in_features, shape.out_features, in_tiles and group == "mlp", shape.copies
            )
            try:
                found[path] = choose_backend(backend, recipe, sizes=sizes)
            except UserError as error:
                if rules.on_unsupported == "error":
                    raise UserError(f"{path}: {error}") from None
                logger.warning("%s: %s: the %s projections run in bf16", path, error, group)
                rules = replace(rules, **{group: False})
                break
        else:
            choices |= found
    return rules, tuple(choices.items())


def packs_residuals(backends: LinearBackends) -> bool:
    """Whether what FP4 products keep for the backward pass is FP4 in memory; the emulation's
    is not."""
    return bool(backends) and all(choice.name != "emulated" for _, choice in backends)


def describe_backends(choices: LinearBackends) -> str:
    """One line for every backend in use: its name, the linears, and why."""
    if not choices:
        return "Backend: no FP4 products"
    paths: dict[Choice, list[str]] = {}
    for path, choice in choices:
        paths.setdefault(choice, []).append(path)
    if len(paths) == 1:
        (choice,) = paths
        return f"Backend: {choice.name} ({choice.reason})"
    return "\n".join(
        f"Backend of {', '.join(names)}: {choice.name} ({choice.reason})"
        for choice, names in paths.items()
    )


def make_segments(
    num_layers: int, recipe: Recipe | str, rules: PrecisionRules
) -> tuple[Segment, ...]:
    """Cuts the blocks into a BF16 prefix, a middle and a BF16 suffix; empty ones are left out.

    A recipe without FP4 needs no protection: everything is one "middle" segment of that recipe.
    """
    recipe = get_recipe(recipe)
    if not recipe.uses_fp4:
        return (Segment("middle", 0, num_layers, recipe, recipe),)
    high = get_recipe("bf16")
    first, last = rules.block_counts(num_layers)
    segments = (
        Segment("prefix", 0, first, high, high),
        Segment(
            "middle",
            first,
            num_layers - last,
            recipe if rules.attention else high,
            recipe if rules.mlp else high,
        ),
        Segment("suffix", num_layers - last, num_layers, high, high),
    )
    return tuple(segment for segment in segments if segment.stop > segment.start)


@dataclass(frozen=True)
class PrecisionPlan:
    """The precision of every linear of a model; `plan.summary()` is a table to print."""

    recipe: str
    rows: tuple[PrecisionRow, ...]

    @property
    def fp4_parameter_share(self) -> float:
        """Fraction of the linear parameters, output head included, whose products run in FP4."""
        return sum(row.parameter_share for row in self.rows if row.uses_fp4)

    @property
    def fp4_flops_share(self) -> float:
        """Fraction of the linears' floating-point operations, output head included, in FP4."""
        return sum(row.flops_share for row in self.rows if row.uses_fp4)

    @property
    def fp4_block_parameter_share(self) -> float:
        """As `fp4_parameter_share`, but of the blocks alone, which is how papers count."""
        blocks = sum(row.parameters for row in self.rows if row.path != "head")
        return sum(row.parameters for row in self.rows if row.uses_fp4) / blocks

    def summary(self) -> str:
        """The plan as lines of text: path, precision, parameters, share of parameters and FLOPs."""
        width = max(len(row.path) for row in self.rows)
        lines = [
            f"Precision plan for {self.recipe}: FP4 holds {self.fp4_block_parameter_share:.1%} of "
            f"the blocks' linear parameters; with the output head {self.fp4_parameter_share:.1%}, "
            f"and {self.fp4_flops_share:.1%} of the linear FLOPs",
            f"  {'linear':{width}}  precision      parameters  % parameters  % FLOPs",
        ]
        for row in self.rows:
            lines.append(
                f"  {row.path:{width}}  {row.precision:9}  {row.parameters:14,}"
                f"  {100 * row.parameter_share:12.1f}  {100 * row.flops_share:7.1f}"
            )
        return "\n".join(lines)

    __str__ = summary


def make_plan(
    recipe: Recipe | str,
    segments: tuple[Segment, ...],
    attention: tuple[LinearShape, ...],
    mlp: tuple[LinearShape, ...],
    head: LinearShape,
    head_precision: str,
) -> PrecisionPlan:
    """Lists the linears of every segment, then the output head, with their shares.

    A linear named "router" is FP32 whatever the recipe: rounding there changes who computes what.
    """
    entries: list[tuple[str, str, bool, int, int]] = []
    for segment in segments:
        blocks = segment.stop - segment.start
        layers = f"blocks {segment.start}" + (f"-{segment.stop - 1}" if blocks > 1 else "")
        for group, group_recipe, shapes in (
            ("attention", segment.attention, attention),
            ("mlp", segment.mlp, mlp),
        ):
            for shape in shapes:
                router = shape.name == ROUTER
                entries.append(
                    (
                        f"{layers} {group}.{shape.name}",
                        "fp32" if router else group_recipe.name,
                        group_recipe.uses_fp4 and not router,
                        blocks * shape.parameters,
                        blocks * shape.flops,
                    )
                )
    entries.append((head.name, head_precision, False, head.parameters, head.flops))
    parameters = sum(entry[3] for entry in entries)
    flops = sum(entry[4] for entry in entries)
    rows = tuple(
        PrecisionRow(path, precision, fp4, count, count / parameters, operations / flops)
        for path, precision, fp4, count, operations in entries
    )
    return PrecisionPlan(get_recipe(recipe).name, rows)
