// The strategy gather-kv: keys and values travel, and every rank attends to all of them.
//
//     my keys and values  ->  every rank's, in the order of the sequence  ->  one attention
//
// GPUs that reach each other put keys straight into that order, and attend meanwhile
// (shared/key_puts.hpp). Others copy what has come into it. On processors the attention finds keys
// where they came, by their spans, and own ones where they lie. A rank attends with its own rows of
// the queries, which shares the work, or with all of them, and then has the bits of one rank alone.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "kernels/consecutive_keys.hpp"
#include "src/base/peer_view.hpp"
#include "src/strategy/shared/key_puts.hpp"
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
    if (layer_.comm.size() > 1) puts_.emplace(layer_, keys_, most_keys());
  }

  void lay_out(Parts& memory) override {
    if (layer_.comm.size() == 1) return states_->lay_out(memory);
    keys_.lay_out(memory);
    const auto ranks = static_cast<std::size_t>(layer_.comm.size());
    const auto rows = static_cast<std::int64_t>(ranks) * keys_.block_rows();
    starts_ =
        memory.take_array<std::int64_t>(ranks * static_cast<std::size_t>(layer_.bounds.batch.size));
    if (is_host()) {
      states_->lay_out(memory);
      gathered_ = keys_.take_block(memory, rows);
      ordered_.start = gathered_.start;
      spans_ = memory.take_array<kernels::KeySpan>(static_cast<std::size_t>(most_keys()));
      return;
    }
    ordered_ = puts_->is_open() ? puts_->whole_keys() : keys_.take_block(memory, most_keys());
    states_->lay_out_scratch(memory);
    // What has come is in order when an attention writes states, and own keys that were copied are
    // read until the end of attentions that write none.
    Parts slots = memory;
    states_->lay_out_slots(slots);
    gathered_.k = gathered_.v = memory.take(static_cast<std::size_t>(
        rows * std::max(keys_.key_bytes(), keys_.value_bytes())));  // one behind the other
    memory.bytes = std::max(memory.bytes, slots.bytes);
  }

  ExchangeInfo exchange() const override {
    return puts_ ? puts_->exchange() : ExchangeInfo{Exchange::gather};
  }

  void prepare(Pass& pass) override {
    keys_.check(pass.run, "gather-kv");
    pass.keys_travel = layer_.comm.size() > 1;
    states_->give(pass);
  }

  void queue(Pass& pass) override {
    const Run& run = pass.run;
    run.enter(Phase::attend);
    if (puts_ && puts_->queue(pass, copied_keys())) return;
    if (layer_.comm.size() > 1) {
      pass.say_to(layer_.kernels);
      keys_.begin(pass);
      run.enter(Phase::exchange);
      gather_keys(pass);
      run.enter(Phase::attend);
    }
    pass.attend_to(pass.merge, Phase::merge, layer_.kernels);
  }

 private:
  bool is_host() const { return layer_.kernels.device() == Device::host; }
  /// Of whole sequences.
  std::int64_t most_keys() const {
    return longspan::most_keys(layer_.options.limits, layer_.bounds.batch.size);
  }

  /// Brings the keys of all ranks here, and makes them those of the run: the whole sequences.
  void gather_keys(Pass& pass) {
    const Run& run = pass.run;
    std::int64_t most = 0;
    for (int p = 0; p < layer_.comm.size(); ++p) {
      most = std::max(most, keys_.rows_of(run, p));
      keys_.find_starts(run, p, {.start = starts_of(p)});
    }
    keys_.find_whole_starts(run, ordered_);
    if (is_host())
      gather_where_they_come(pass, most);
    else
      gather_in_order(pass, most);
    keys_.attend_to(pass, ordered_, {.length = run.arrays.keys.length});
  }

  /// On processors: ranks know of one another how many keys they have, and no more travels.
  void gather_where_they_come(Pass& pass, std::int64_t most) {
    const Run& run = pass.run;
    const int ranks = layer_.comm.size(), rank = layer_.comm.rank();
    const KeyBlock own = keys_.own_keys(run, slot_of(rank, most));
    comm::Transfer word;
    if (pass.said)
      word = layer_.comm.start_all_gather(nullptr, nullptr, 0, run.stream, "gather of keys",
                                          pass.said);
    for (int s = 1; s < ranks; ++s) {
      const int from = (rank - s + ranks) % ranks;
      const KeyBlock to = slot_of(from, most);
      const auto piece = [&](const void* sent, void* received, std::int64_t row_bytes) {
        const auto bytes = [&](int p) {
          return static_cast<std::size_t>(keys_.rows_of(run, p) * row_bytes);
        };
        return comm::Piece{sent, bytes(rank), received, bytes(from)};
      };
      const std::array pieces{piece(own.k, to.k, keys_.key_bytes()),
                              piece(own.v, to.v, keys_.value_bytes()),
                              piece(own.positions, to.positions, sizeof(std::int64_t))};
      const std::size_t count = to.positions != nullptr ? 3 : 2;
      open_[static_cast<std::size_t>(s)] =
          layer_.comm.start_shifts({pieces.data(), count}, s, run.stream, "gather of keys");
    }
    word.wait(run.stream);
    for (comm::Transfers& transfers : open_) transfers.wait(run.stream);
    pass.attend.spans = {spans_, find_spans(run, own, most)};
  }

  /// Finds where all keys lie, in the order of the sequences; returns the number of spans.
  std::int64_t find_spans(const Run& run, const KeyBlock& own, std::int64_t most) const {
    std::int64_t count = 0;
    for (int p = 0; p < layer_.comm.size(); ++p) {
      const KeyBlock block = p == layer_.comm.rank() ? own : slot_of(p, most);
      const Shard all = keys_.shard_of(run, p, block);
      std::int64_t whole = 0;
      for (int b = 0; b < run.arrays.batch; ++b) {
        const Shard shard = all.for_sequence(b);
        const std::int64_t length = run.attend.batch.keys(b, all);
        const std::int64_t keys = shard.local_len(length);
        const std::int64_t start = run.arrays.batch > 1 ? block.start[b] : 0;
        for (std::int64_t i = 0; i < keys;) {
          if (count == most_keys())
            throw InputError("the ranks' keys overlap: they have more than the sequences");
          spans_[count++] = {whole + shard.position(i, length),
                             block.k + (start + i) * keys_.key_bytes(),
                             block.v + (start + i) * keys_.value_bytes()};
          i += kernels::consecutive_keys(shard, i, keys, length);
        }
        whole += length;
      }
    }
    std::sort(spans_, spans_ + count, [](const kernels::KeySpan& a, const kernels::KeySpan& b) {
      return a.first < b.first;
    });
    return count;
  }

  /// On GPUs: keys, and then values, come in equal slots, and are copied into their order.
  void gather_in_order(const Pass& pass, std::int64_t most) const {
    const Run& run = pass.run;
    const int rank = layer_.comm.rank();
    const auto bring = [&](std::byte* KeyBlock::*part, std::int64_t row_bytes, const char* step) {
      const auto only = [&](KeyBlock block) {
        (part == &KeyBlock::k ? block.v : block.k) = nullptr;
        return block;
      };
      std::byte* const slot = slot_of(rank, most, row_bytes, row_bytes).*part;
      KeyBlock own = slot_of(rank, most, row_bytes, row_bytes);
      if (keys_.must_copy(run)) {
        keys_.copy_to(run, only(own));
      } else {
        own = keys_.in_place(run);
        layer_.kernels.place_rows({own.*part, slot, nullptr, keys_.rows_of(run, rank), row_bytes},
                                  run.stream);
      }
      layer_.comm.all_gather(slot, gathered_.*part, static_cast<std::size_t>(most * row_bytes),
                             run.stream, step, pass.said);
      for (int p = 0; p < layer_.comm.size(); ++p)
        keys_.copy_in_order(run, p, p == rank ? own : slot_of(p, most, row_bytes, row_bytes),
                            only(ordered_));
    };
    bring(&KeyBlock::k, keys_.key_bytes(), "gather of keys");
    bring(&KeyBlock::v, keys_.value_bytes(), "gather of values");
  }

  /// Room for this rank's keys, where those of the others do not come to gathered_.
  KeyBlock copied_keys() const {
    return {gathered_.k, gathered_.k + keys_.block_rows() * keys_.key_bytes(), starts_, nullptr};
  }

  /// Where the keys of a rank come to, in memory for `most` rows of each.
  KeyBlock slot_of(int rank, std::int64_t most) const {
    return slot_of(rank, most, keys_.key_bytes(), keys_.value_bytes());
  }
  KeyBlock slot_of(int rank, std::int64_t most, std::int64_t k_bytes, std::int64_t v_bytes) const {
    const std::int64_t row = rank * most;
    return {gathered_.k + row * k_bytes, gathered_.v + row * v_bytes, starts_of(rank),
            gathered_.positions == nullptr ? nullptr : gathered_.positions + row};
  }
  std::int64_t* starts_of(int rank) const {
    return starts_ + std::int64_t{rank} * layer_.bounds.batch.size;
  }

  Layer layer_;
  TravellingKeys keys_;
  std::optional<KeyPuts> puts_;        // of several ranks, for what it takes
  std::vector<comm::Transfers> open_;  // by distance
  std::optional<StateMemory> states_;  // one slot
  KeyBlock gathered_;  // [ranks, rows of a rank] as they come; on GPUs keys and values have the
                       // same memory, one behind the other
  std::int64_t* starts_ = nullptr;     // [ranks, batch] of the sequences in each rank's slot
  kernels::KeySpan* spans_ = nullptr;  // [most_keys()] on processors
  KeyBlock ordered_;  // whole sequences, in their order; on processors their starts
};

std::string refusal(const Options& options, int ranks) {
  if (std::string parts = refuse_parts(options); !parts.empty()) return parts;
  if (ranks == 1) return "";
  if (std::string keys = refuse_travelling_keys(options, ranks); !keys.empty()) return keys;
  if (options.exchange == Exchange::peer_buffers_apart)
    return fmt::format("it sends keys, and does not take exchange {}", name(options.exchange));
  return "";
}

/// Counts the keys and values of all ranks, as they come and, on GPUs, in the order of the
/// sequence, which is memory that other GPUs write where they reach it.
RunCost cost(const Options& options, int ranks, const RunSize& size, Device device) {
  const double own_rows = options.queries ? size.most_tokens : size.tokens;
  const double states = own_rows * state_row_bytes(options);
  if (ranks == 1) return {.workspace_bytes = states};
  const double row = key_row_bytes(options);
  const double come = ranks * most_keys_of_a_rank(options.keys, size.keys, ranks);
  RunCost cost{.received_bytes = (ranks - 1) * size.keys / ranks * row,
               .messages = 2,
               .work = options.queries ? 1.0 / ranks : 1.0};
  if (device == Device::host) {
    cost.workspace_bytes = states + come * row + size.keys * sizeof(kernels::KeySpan);
    return cost;
  }
  const double wider = row * std::max(options.head_dim, options.of_values()) /
                       (options.head_dim + options.of_values());
  cost.workspace_bytes = std::max(states, come * wider) + size.keys * row;
  if (ranks <= PeerView::kMostRanks && options.exchange != Exchange::gather) {
    const int pieces = pieces_of_keys(options.heads, options.kv_heads, come / ranks * row).count;
    cost.messages = cost.peer_messages = 2;
    // While the first piece comes, rows attend to own keys, of which few ranks have much.
    const double awaited = 1 - 1.5 / ranks;
    if (own_rows >= kernels::KeyArrivals::kLeastRows)
      cost.overlapped_bytes = cost.received_bytes * (1 - awaited / pieces);
  } else {
    cost.copied_bytes = 2 * size.keys * row;
  }
  return cost;
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
