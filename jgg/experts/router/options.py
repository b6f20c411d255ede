"""The options of a router, checked."""

from typing import NamedTuple

from jgg.core.arguments import as_finite, as_flag, as_int, check_one_of

SCORES = ("softmax", "topk_softmax", "sigmoid")


class RouterOptions(NamedTuple):
    """The options of `route` that are not arrays, as plain numbers."""

    topk: int
    score: str
    normalize: bool
    scale: float
    num_groups: int
    topk_groups: int
    scores_per_group: int | None

    @classmethod
    def checked(
        cls,
        num_experts: int,
        *,
        topk: int,
        score: str,
        normalize: bool | None,
        scale: float,
        num_groups: int,
        topk_groups: int,
        scores_per_group: int | None,
    ) -> "RouterOptions":
        """The options; raises if `route` does not allow them for `num_experts` experts."""
        topk, num_groups = as_int("topk", topk), as_int("num_groups", num_groups)
        topk_groups = as_int("topk_groups", topk_groups)
        if num_groups < 1 or num_experts % num_groups:
            raise ValueError(f"num_groups must divide the number of experts, {num_experts}, got {num_groups}.")
        if not 1 <= topk_groups <= num_groups:
            raise ValueError(f"topk_groups must be between 1 and num_groups, {num_groups}, got {topk_groups}.")
        group_size = num_experts // num_groups
        _check_topk(topk, topk_groups * group_size, "" if topk_groups == num_groups else f"{num_groups=}")
        if scores_per_group is not None:
            scores_per_group = as_int("scores_per_group", scores_per_group)
            if not 1 <= scores_per_group <= group_size:
                expected = f"None or between 1 and the experts of a group, {group_size}"
                raise ValueError(f"scores_per_group must be {expected}, got {scores_per_group}.")
        check_one_of("score", score, SCORES)
        normalize = topk > 1 or score == "topk_softmax" if normalize is None else as_flag("normalize", normalize)
        if score == "topk_softmax" and not normalize:
            expected = "True with score='topk_softmax', whose weights sum to 1"
            raise ValueError(f"normalize must be {expected}, got {normalize}.")
        return cls(topk, score, normalize, as_finite("scale", scale), num_groups, topk_groups, scores_per_group)

    @property
    def takes_every_group(self) -> bool:
        """Whether a token may take experts of all groups."""
        return self.topk_groups == self.num_groups


def _check_topk(topk: int, eligible: int, groups: str) -> None:
    if not 1 <= topk <= eligible:
        what = f"experts in topk_groups of {groups} groups" if groups else "experts"
        raise ValueError(f"topk must be between 1 and the number of {what}, {eligible}, got {topk}.")
