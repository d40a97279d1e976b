"""Token sequences for scoring and training: checks, microbatches, padding, and leaving out wasted work."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from hacrl_core.errors import EngineError

Ints = npt.NDArray[np.int64]

# Laying nodes out for attention has its price: padded rows are run as they are unless the tree is clearly smaller.
_TREE_BELOW = 0.9


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One response in the learner's tokens, after its prompt."""

    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """The distinct prefixes of a microbatch's rows, one node each. Padding points at node 0."""

    tokens_N: Ints
    depth_N: Ints  # position in the sequence
    place_BT: Ints  # node of every cell of the padded rows
    cell_N: Ints  # a cell of [B*T] that each node stands in


@dataclass(frozen=True)
class Microbatch:
    """Rows padded on the right to the longest. ``rows_B`` are their places in the minibatch."""

    rows_B: Ints
    input_ids_BT: Ints  # without each row's last token, which predicts nothing
    positions_R: Ints  # flat places in [B*T] that predict a response token, row after row
    targets_R: Ints  # the response tokens they predict
    lengths: tuple[int, ...]  # response tokens per row
    tokens: int  # of input_ids_BT, padding left out
    tree: Tree | None = None  # what to run instead of input_ids_BT, where that is less


def check_sequences(sequences: Sequence[TrainSequence], *, vocabulary: int, context_length: int) -> None:
    """Refuse what would give an undefined or silently wrong log-probability."""
    for row, sequence in enumerate(sequences):
        prompt, response = sequence.prompt_token_ids, sequence.response_token_ids
        if not prompt or not response:
            part = "response" if prompt else "prompt"
            raise EngineError(f"sequence {row}: the {part} has no tokens; leave the row out before scoring or training")
        if len(prompt) + len(response) > context_length:
            raise EngineError(
                f"sequence {row}: {len(prompt)} + {len(response)} tokens exceed the model's {context_length} "
                "positions; lower max_tokens"
            )
        if max(max(prompt), max(response)) >= vocabulary or min(min(prompt), min(response)) < 0:
            raise EngineError(
                f"sequence {row}: a token id is outside 0..{vocabulary - 1}; tokenise with the learner's tokenizer"
            )


def microbatches(
    sequences: Sequence[TrainSequence], token_budget: int, pad_token_id: int, *, share_prefixes: bool = False
) -> list[Microbatch]:
    """Cut rows into microbatches of at most ``token_budget`` tokens, the longest first, so that memory peaks at once.

    Without shared prefixes rows are sorted by length and padded tokens count. With them the responses of a prompt stay
    together, and of what a token keeps in memory three quarters go with the distinct prefixes and one with the padded
    rows. A row longer than the budget makes a microbatch of its own.
    """
    lengths = np.array([len(s.prompt_token_ids) + len(s.response_token_ids) - 1 for s in sequences], dtype=np.int64)
    if not share_prefixes:
        order = np.argsort(-lengths, kind="stable")
        cut = _cut(order, lengths, np.zeros_like(lengths), token_budget, padded_counts=4)
        return [_pad(sequences, rows_B, lengths, pad_token_id) for rows_B in cut]
    order = _by_prompt(sequences, lengths)
    new = lengths[order] - _shared_with_last([sequences[row] for row in order])
    cut = _cut(order, lengths, new, token_budget, padded_counts=1)
    return [_with_tree(_pad(sequences, rows_B, lengths, pad_token_id), lengths[rows_B]) for rows_B in cut]


def _cut(order: Ints, lengths: Ints, new: Ints, budget: int, *, padded_counts: int) -> list[Ints]:
    """Cut ``order`` into pieces within the budget.

    Of a token ``padded_counts`` quarters count where it is padded, and the rest where it is new beside the row before;
    ``new`` holds the number of such tokens per row.
    """
    pieces = []
    start = 0
    distinct = 0
    width = 0
    for at, (length, own) in enumerate(zip(lengths[order].tolist(), new.tolist(), strict=True)):
        wider = max(width, length)
        cost = (4 - padded_counts) * (distinct + own) + padded_counts * wider * (at + 1 - start)
        if at > start and cost > 4 * budget:
            pieces.append(order[start:at])
            start = at
            distinct = 0
            wider = own = length
        distinct, width = distinct + own, wider
    return [*pieces, order[start:]] if len(order) else []


def _by_prompt(sequences: Sequence[TrainSequence], lengths: Ints) -> Ints:
    """Order rows by prompt, those with the longest row first.

    The responses of a prompt are sorted, so that neighbours share most.
    """
    longest: dict[tuple[int, ...], int] = {}
    for sequence, length in zip(sequences, lengths.tolist(), strict=True):
        longest[sequence.prompt_token_ids] = max(length, longest.get(sequence.prompt_token_ids, 0))

    def key(row: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        prompt = sequences[row].prompt_token_ids
        return -longest[prompt], prompt, sequences[row].response_token_ids

    return np.array(sorted(range(len(sequences)), key=key), dtype=np.int64)


def _shared_with_last(sequences: Sequence[TrainSequence]) -> Ints:
    """For every row how many input tokens it has in common with the one before, from the start on."""
    shared = []
    last: tuple[int, ...] = ()
    for sequence in sequences:
        row = (*sequence.prompt_token_ids, *sequence.response_token_ids[:-1])
        shared.append(_common(row, last))
        last = row
    return np.array(shared, dtype=np.int64)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many tokens two rows begin with alike, found by halving: whole pieces compare faster than tokens."""
    alike, most = 0, min(len(one), len(other))
    while alike < most:
        middle = (alike + most + 1) // 2
        if one[alike:middle] == other[alike:middle]:
            alike = middle
        else:
            most = middle - 1
    return alike


def _with_tree(batch: Microbatch, lengths_B: Ints) -> Microbatch:
    tree = prefix_tree(batch.input_ids_BT, lengths_B)
    worth_it = len(tree.tokens_N) < _TREE_BELOW * batch.input_ids_BT.size
    return replace(batch, tree=tree) if worth_it else batch


def prefix_tree(ids_BT: Ints, lengths_B: Ints) -> Tree:
    """Each row shares with the row above as long as their tokens agree; sorted rows share all they can."""
    columns_T = np.arange(ids_BT.shape[1])
    real_BT = columns_T < lengths_B[:, None]
    same_BT = np.zeros_like(real_BT)
    same_BT[1:] = (ids_BT[1:] == ids_BT[:-1]) & real_BT[1:] & real_BT[:-1]
    new_BT = real_BT & ~np.logical_and.accumulate(same_BT, axis=1)
    number_BT = np.where(new_BT, new_BT.cumsum().reshape(new_BT.shape) - 1, -1)
    # A shared cell is the node that was last new above it: new nodes are numbered row by row, so that is the largest so
    # far.
    place_BT = np.where(real_BT, np.maximum.accumulate(number_BT, axis=0), 0)
    depth_BT = np.broadcast_to(columns_T, ids_BT.shape)
    return Tree(ids_BT[new_BT], depth_BT[new_BT], place_BT, np.flatnonzero(new_BT))


def _pad(sequences: Sequence[TrainSequence], rows_B: Ints, lengths: Ints, pad_token_id: int) -> Microbatch:
    chosen = [sequences[row] for row in rows_B]
    used_B = lengths[rows_B]
    width = int(used_B.max())
    columns_T = np.arange(width)
    input_ids_BT = np.full((len(chosen), width), pad_token_id, dtype=np.int64)
    inputs = chain.from_iterable(chain(s.prompt_token_ids, s.response_token_ids[:-1]) for s in chosen)
    input_ids_BT[columns_T < used_B[:, None]] = np.fromiter(inputs, np.int64, int(used_B.sum()))
    prompt_B = np.array([len(s.prompt_token_ids) for s in chosen], dtype=np.int64)
    predicts_BT = (columns_T >= prompt_B[:, None] - 1) & (columns_T < used_B[:, None])
    positions_R = np.flatnonzero(predicts_BT)
    targets = chain.from_iterable(s.response_token_ids for s in chosen)
    targets_R = np.fromiter(targets, np.int64, len(positions_R))
    return Microbatch(
        rows_B,
        input_ids_BT,
        positions_R,
        targets_R,
        tuple(len(s.response_token_ids) for s in chosen),
        int(used_B.sum()),
    )


def padding_share(batches: Sequence[Microbatch]) -> float:
    """Return the share of the forward pass spent on padding."""
    padded = sum(batch.input_ids_BT.size for batch in batches)
    return 1.0 - sum(batch.tokens for batch in batches) / max(1, padded)


@dataclass(frozen=True)
class RowPlan:
    """Which rows of a minibatch pass through the model, and for how many responses each of them counts."""

    rows_K: Ints  # kept rows, ascending
    weights_K: npt.NDArray[np.float64]  # responses merged into the row, itself included
    representative_B: Ints  # for every row of the minibatch, its place in rows_K; -1 where it was dropped
    saved_share: float  # share of the minibatch's tokens that need no forward and no backward


def merge_identical(keys: Sequence[Hashable]) -> tuple[Ints, Ints]:
    """Return the first row of each distinct key, and for every row the place of its first row among them."""
    places: dict[Hashable, int] = {}
    place_B = np.array([places.setdefault(key, len(places)) for key in keys], dtype=np.int64)
    first_K = np.unique(place_B, return_index=True)[1].astype(np.int64)
    return first_K, place_B


def plan_rows(
    keys: Sequence[Hashable],
    advantage_B: npt.ArrayLike,
    kl_coefficient_B: npt.ArrayLike,
    tokens_B: npt.ArrayLike,
) -> RowPlan:
    """Drop rows whose gradient is zero for certain, and pass identical rows once, weighted by their count.

    A row's gradient is zero for certain when its advantage is exactly zero (a group without signal) and it bears no KL
    term: whatever its ratio, the loss is 0·ratio. ``keys`` must hold all that the loss of a row depends on: its token
    ids, its sampler, advantage and the log-probs in the denominator. The loss must still be divided by the weight of
    the whole minibatch. A minibatch that keeps no row still makes its optimizer step (see ``Trainer.step``).
    """
    informative_B = (np.asarray(advantage_B) != 0) | (np.asarray(kl_coefficient_B) != 0)
    first_K, place_B = merge_identical(keys)
    counts_K = np.bincount(place_B, weights=informative_B, minlength=len(first_K))
    kept = informative_B[first_K]
    if not np.array_equal(informative_B, kept[place_B]):
        raise EngineError("plan_rows: rows with equal keys differ in advantage or KL; put both into the key")
    rows_K = first_K[kept]
    new_place = np.where(kept, np.cumsum(kept) - 1, -1)
    tokens_B = np.asarray(tokens_B)
    saved = 1.0 - float(tokens_B[rows_K].sum()) / max(1, int(tokens_B.sum()))
    return RowPlan(rows_K, counts_K[kept], new_place[place_B], saved)
