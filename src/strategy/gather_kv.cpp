// The strategy gather-kv: keys and values travel, and every rank attends to all of them.
//
//     my keys and values  ->  every rank's, in the order of the sequence  ->  one attention
//
// A rank attends with its own rows of the queries, which shares the work, or with all of them, and
// then has the bits of one rank alone. This is the plainest strategy: nothing overlaps.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "src/strategy/shared/state_memory.hpp"
#include "src/strategy/shared/travelling_keys.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {
namespace {

class GatherKv final : public Strategy {
 public:
  explicit GatherKv(const Layer& layer)
      : layer_(layer), keys_(layer), open_(static_cast<std::size_t>(layer.comm.size())) {
    layer_.bounds.shard.rank = 0;  // that of the attention, which has all keys
    layer_.bounds.shard.ranks = 1;
    states_.emplace(layer_.kernels, layer_.bounds);
  }

  void lay_out(Parts& memory) override {
    const kernels::AttendParams& bounds = layer_.bounds;
    states_->lay_out(memory);
    if (layer_.comm.size() == 1) return;
    keys_.lay_out(memory);
    const auto rows = static_cast<std::size_t>(layer_.comm.size() * keys_.block_rows());
    gathered_ = memory.take(
        rows * static_cast<std::size_t>(std::max(keys_.key_bytes(), keys_.value_bytes())));
    starts_ = memory.take_array<std::int64_t>(static_cast<std::size_t>(layer_.comm.size()) *
                                              static_cast<std::size_t>(bounds.batch.size));
    if (layer_.options.keys.layout == Layout::listed)
      positions_ = memory.take_array<std::int64_t>(rows);
    ordered_ = keys_.take_block(memory, bounds.max_kv_len * bounds.batch.size);
  }

  ExchangeInfo exchange() const override { return {Exchange::gather}; }

  void prepare(Run& run) const override {
    keys_.check(run, "gather-kv");
    run.keys_travel = layer_.comm.size() > 1;
    states_->give(run);
  }

  void queue(Run& run) const override {
    run.enter(Phase::attend);
    if (layer_.comm.size() > 1) {
      run.say_to(layer_.kernels);
      keys_.begin(run);
      run.enter(Phase::exchange);
      gather_keys(run);
      run.enter(Phase::attend);
    }
    run.attend_to(run.merge, Phase::merge, layer_.kernels);
  }

 private:
  /// Brings the keys of all ranks here, and makes them those of the run: the whole sequences.
  void gather_keys(Run& run) const {
    std::int64_t most = 0;
    for (int p = 0; p < layer_.comm.size(); ++p) {
      most = std::max(most, keys_.rows_of(run, p));
      keys_.find_starts(run, p, {.start = starts_of(p)});
    }
    keys_.find_whole_starts(run, ordered_);
    if (positions_ != nullptr)
      exchange(run, run.arrays.keys.table, positions_, sizeof(std::int64_t), most,
               "gather of key positions");
    const auto bring = [&](std::byte* KeyBlock::*part, std::int64_t row_bytes, const char* step) {
      const KeyBlock own = own_block(run, part, most * row_bytes);
      exchange(run, own.*part, gathered_, row_bytes, most, step);
      for (int p = 0; p < layer_.comm.size(); ++p) {
        const bool is_own = p == layer_.comm.rank();
        KeyBlock from = is_own ? own : block_of(p, part, most, row_bytes), to = ordered_;
        (part == &KeyBlock::k ? to.v : to.k) = nullptr;
        keys_.copy_in_order(run, p, from, to);
      }
    };
    bring(&KeyBlock::k, keys_.key_bytes(), "gather of keys");
    bring(&KeyBlock::v, keys_.value_bytes(), "gather of values");
    run.attend.k = keys_.keys_in(ordered_);
    run.attend.v = keys_.values_in(ordered_);
    run.attend.pages = {};
    run.attend.batch.key_start = run.arrays.batch > 1 ? ordered_.start : nullptr;
    run.attend.batch.key_pitch = 0;
    run.attend.shard = {.length = run.arrays.keys.length};
  }

  /// This rank's keys, or its values, as they are sent: where they lie, or in its slot.
  KeyBlock own_block(const Run& run, std::byte* KeyBlock::*part, std::int64_t slot_bytes) const {
    if (!keys_.must_copy(run)) return keys_.in_place(run);
    KeyBlock own{.start = starts_of(layer_.comm.rank()),
                 .positions = keys_.in_place(run).positions};
    own.*part = gathered_ + layer_.comm.rank() * slot_bytes;
    keys_.copy_to(run, own);
    return own;
  }
  KeyBlock block_of(int rank, std::byte* KeyBlock::*part, std::int64_t most,
                    std::int64_t row_bytes) const {
    KeyBlock block{.start = starts_of(rank),
                   .positions = positions_ == nullptr ? nullptr : positions_ + rank * most};
    block.*part = gathered_ + rank * most * row_bytes;
    return block;
  }
  std::int64_t* starts_of(int rank) const {
    return starts_ + std::int64_t{rank} * layer_.bounds.batch.size;
  }

  /// Brings every rank's rows to its slot of `most` rows. Where ranks know of one another how many
  /// they have, no more travels; else equal slots do, in one collective.
  void exchange(const Run& run, const void* own, void* slots, std::int64_t row_bytes,
                std::int64_t most, const char* step) const {
    const int ranks = layer_.comm.size(), rank = layer_.comm.rank();
    const auto bytes = [&](int p) {
      return static_cast<std::size_t>(keys_.rows_of(run, p) * row_bytes);
    };
    const auto slot = [&](int p) { return static_cast<std::byte*>(slots) + p * most * row_bytes; };
    if (layer_.kernels.device() != Device::host) {
      if (own != slot(rank))
        layer_.rows.place_rows({static_cast<const std::byte*>(own), slot(rank), nullptr,
                                keys_.rows_of(run, rank), row_bytes},
                               run.stream);
      return layer_.comm.all_gather(slot(rank), slots, static_cast<std::size_t>(most * row_bytes),
                                    run.stream, step, run.said);
    }
    comm::Transfer word;
    if (run.said)
      word = layer_.comm.start_all_gather(nullptr, nullptr, 0, run.stream, step, run.said);
    for (int s = 1; s < ranks; ++s) {
      const int from = (rank - s + ranks) % ranks;
      open_[static_cast<std::size_t>(s)] =
          layer_.comm.start_shift(own, bytes(rank), slot(from), bytes(from), s, run.stream, step);
    }
    word.wait(run.stream);
    for (comm::Transfer& transfer : open_) transfer.wait(run.stream);
  }

  Layer layer_;
  TravellingKeys keys_;
  mutable std::vector<comm::Transfer> open_;  // by distance
  std::optional<StateMemory> states_;         // one slot
  std::byte* gathered_ = nullptr;      // [ranks, rows of a rank, row_bytes] of keys, then of values
  std::int64_t* starts_ = nullptr;     // [ranks, batch] of the sequences in each rank's slot
  std::int64_t* positions_ = nullptr;  // [ranks, rows of a rank] of listed keys; else null
  KeyBlock ordered_;                   // whole sequences, in their order
};

std::string refusal(const Options& options, int ranks) {
  if (std::string parts = refuse_parts(options); !parts.empty()) return parts;
  if (ranks == 1) return "";
  if (options.limits.max_kv_len == 0) return "it needs max_kv_len, for its workspace";
  if (options.exchange != Exchange::automatic && options.exchange != Exchange::gather)
    return fmt::format("it gathers keys, and does not take exchange {}", name(options.exchange));
  return "";
}

/// Counts the keys and values of all ranks, as they come and in the order of the sequence.
RunCost cost(const Options& options, int ranks, const RunSize& size) {
  const double own_rows = options.queries ? size.most_tokens : size.tokens;
  const double states = own_rows * state_row_bytes(options);
  if (ranks == 1) return {.workspace_bytes = states};
  const double row = key_row_bytes(options);
  const double wider = row * std::max(options.head_dim, options.of_values()) /
                       (options.head_dim + options.of_values());
  return {.received_bytes = (ranks - 1) * size.keys / ranks * row,
          .workspace_bytes = states + size.keys * row +
                             ranks * most_keys_of_a_rank(options.keys, size.keys, ranks) * wider,
          .messages = 2,
          .work = options.queries ? 1.0 / ranks : 1.0,
          .copied_bytes = 2 * size.keys * row};
}

}  // namespace

StrategyEntry gather_kv() {
  return {.info = {"gather-kv", "all rows, or its own rows", "all rows, or its own rows",
                   "(P-1)/P S kv_heads (head_dim + value_dim) b"},
          .preference = 2,
          .keeps_order = folds_as_one_rank,
          .takes_tables = false,
          .balanced =
              [](const Options& options) {
                return options.queries ? Balanced::by_queries : Balanced::evenly;
              },
          .refusal = refusal,
          .cost = cost,
          .make = [](const Layer& layer) -> std::unique_ptr<Strategy> {
            return std::make_unique<GatherKv>(layer);
          }};
}

}  // namespace longspan
