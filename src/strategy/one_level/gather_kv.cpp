// The strategy gather-kv: keys and values travel, and every rank attends to all of them.
//
//     my keys and values  ->  every rank's, in the order of the sequence  ->  one attention
//
// GPUs that reach each other put keys directly into that order, and attend meanwhile
// (shared/key_puts.hpp). Other GPUs copy received keys into that order. On CPUs the attention finds
// keys by their spans: received ones in the receive buffer, own ones in place. A rank attends with
// its own rows of the queries, which shares the work, or with all of them; it then has the same
// bits as one rank alone.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>

#include "kernels/consecutive_keys.hpp"
#include "src/base/peer_view.hpp"
#include "src/strategy/route.hpp"
#include "src/strategy/shared/key_gradients.hpp"
#include "src/strategy/shared/key_puts.hpp"
#include "src/strategy/shared/state_memory.hpp"
#include "src/strategy/shared/travelling_keys.hpp"
#include "src/strategy/shared/walk.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {
namespace {

class GatherKv final : public Strategy {
 public:
  explicit GatherKv(const LayerContext& layer)
      : layer_(layer), keys_(layer), route_(ranks()), underway_(ranks()) {
    layer_.bounds.shard.rank = 0;  // of the attention, which has all keys
    layer_.bounds.shard.ranks = 1;
    states_.emplace(layer_.kernels, layer_.bounds);
    if (layer_.options.gradients) gradients_.emplace(layer_, keys_);
    if (ranks() == 1) return;
    puts_.emplace(layer_, keys_, most_keys());
    make_gather({.ranks = ranks(), .parts = is_host() ? 0 : keys_.has_values() ? 2 : 1}, route_);
  }

  void lay_out(Parts& memory) override {
    if (gradients_) gradients_->lay_out(memory);
    if (ranks() == 1) return states_->lay_out(memory);
    keys_.lay_out(memory);
    const std::int64_t rows = ranks() * keys_.block_rows(), batch = layer_.bounds.batch.size;
    starts_ = memory.take_array<std::int64_t>(static_cast<std::size_t>(ranks() * batch));
    if (is_host()) {
      states_->lay_out(memory);
      gathered_ = keys_.take_block(memory, rows);
      ordered_.start = gathered_.start;
      spans_ = memory.take_array<kernels::KeySpan>(static_cast<std::size_t>(most_keys()));
      return;
    }
    ordered_ = puts_->is_open() ? puts_->whole_keys() : keys_.take_block(memory, most_keys());
    states_->lay_out_scratch(memory);
    // When an attention writes states, received keys are already copied into order. Copied own keys
    // are read until the end of attentions that write none.
    Parts slots = memory;
    states_->lay_out_slots(slots);
    gathered_.k = gathered_.v = memory.take(static_cast<std::size_t>(
        rows * std::max(keys_.key_bytes(), keys_.value_bytes())));  // one after the other
    memory.bytes = std::max(memory.bytes, slots.bytes);
  }

  void backward(Pass& pass, const GradientArgs& args) override { gradients_->backward(pass, args); }

  ExchangeInfo exchange() const override {
    return puts_ ? puts_->exchange() : ExchangeInfo{Exchange::gather};
  }

  void prepare(Pass& pass) override {
    keys_.check(pass.run, "gather-kv");
    pass.keys_travel = ranks() > 1;
    states_->give(pass);
  }

  void queue(Pass& pass) override {
    const Run& run = pass.run;
    run.enter(Phase::attend);
    if (ranks() == 1) return pass.attend_to(pass.merge, Phase::merge, layer_.kernels);
    if (puts_->queue(pass, copied_keys())) return;
    pass.write_own_digest(layer_.kernels);
    keys_.begin(pass);
    run.enter(Phase::exchange);
    Forward forward(*this, pass, find_starts(run));
    walk(route_, pass, layer_.comm, "gather of keys", underway_, forward);
  }

 private:
  /// Attends to the keys of all ranks, received in the way of the device.
  class Forward final : public Visitor {
   public:
    /// `most`: keys of a rank.
    Forward(const GatherKv& gather, Pass& pass, std::int64_t most)
        : gather_(gather), pass_(pass), most_(most) {
      if (gather_.is_host()) own_ = gather_.own_keys(pass.run, most);
    }

    comm::Transfers start(const Move& move) override {
      if (gather_.is_host()) return gather_.start_shift(pass_.run, move, own_, most_);
      gather_.gather_in_order(pass_, move.part, most_);
      return {};
    }

    void visit(const Step&, const kernels::BetweenTiles&) override {
      if (gather_.is_host())
        pass_.attend.spans = {gather_.spans_, gather_.find_spans(pass_.run, own_, most_)};
      gather_.keys_.attend_to(pass_, gather_.ordered_, {.length = pass_.run.arrays.keys.length});
      pass_.run.enter(Phase::attend);
      pass_.attend_to(pass_.merge, Phase::merge, gather_.layer_.kernels);
    }

   private:
    const GatherKv& gather_;
    Pass& pass_;
    std::int64_t most_;
    KeyBlock own_;  // on CPUs
  };

  int ranks() const { return layer_.comm.size(); }
  bool is_host() const { return layer_.kernels.device() == Device::host; }
  /// For whole sequences.
  std::int64_t most_keys() const {
    return longspan::most_keys(layer_.options.limits, layer_.bounds.batch.size);
  }

  /// Computes where sequences start in the keys of every rank, and in all of them; returns the most
  /// keys of a rank.
  std::int64_t find_starts(const Run& run) const {
    std::int64_t most = 0;
    for (int p = 0; p < ranks(); ++p) {
      most = std::max(most, keys_.rows_of(run, p));
      keys_.find_starts(run, p, {.start = starts_of(p)});
    }
    keys_.find_whole_starts(run, ordered_);
    return most;
  }

  KeyBlock own_keys(const Run& run, std::int64_t most) const {
    return keys_.own_keys(run, slot_of(layer_.comm.rank(), most));
  }

  /// On CPUs: every rank knows how many keys each rank has, so exactly these travel.
  comm::Transfers start_shift(const Run& run, const Move& move, const KeyBlock& own,
                              std::int64_t most) const {
    const int from = (layer_.comm.rank() - move.distance + ranks()) % ranks();
    std::array<comm::Piece, TravellingKeys::kPieces> pieces;
    const std::size_t count = keys_.list_pieces(run, move, own, slot_of(from, most), pieces.data());
    return layer_.comm.start_shifts({pieces.data(), count}, move.distance, run.stream,
                                    "gather of keys");
  }

  /// Computes the spans of all keys, in the order of the sequences; returns their number.
  std::int64_t find_spans(const Run& run, const KeyBlock& own, std::int64_t most) const {
    std::int64_t count = 0;
    for (int p = 0; p < ranks(); ++p) {
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
          std::byte* const key = block.k + (start + i) * keys_.key_bytes();
          spans_[count++] = {
              whole + shard.position(i, length), key,
              keys_.has_values() ? block.v + (start + i) * keys_.value_bytes() : key};
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

  /// On GPUs: keys (part 0), and then values, arrive in equal slots and are copied into their
  /// order.
  void gather_in_order(const Pass& pass, int part, std::int64_t most) const {
    const Run& run = pass.run;
    const int rank = layer_.comm.rank();
    std::byte* KeyBlock::*const side = part == 0 ? &KeyBlock::k : &KeyBlock::v;
    const std::int64_t row_bytes = part == 0 ? keys_.key_bytes() : keys_.value_bytes();
    const auto only = [&](KeyBlock block) {
      (part == 0 ? block.v : block.k) = nullptr;
      return block;
    };
    const auto slot = [&](int p) { return slot_of(p, most, row_bytes, row_bytes); };
    std::byte* const mine = slot(rank).*side;
    KeyBlock own = slot(rank);
    if (keys_.must_copy(run)) {
      keys_.copy_to(run, only(own));
    } else {
      own = keys_.in_place(run);
      layer_.kernels.place_rows({own.*side, mine, nullptr, keys_.rows_of(run, rank), row_bytes},
                                run.stream);
    }
    layer_.comm.all_gather(mine, gathered_.*side, static_cast<std::size_t>(most * row_bytes),
                           run.stream, part == 0 ? "gather of keys" : "gather of values",
                           pass.digests);
    for (int p = 0; p < ranks(); ++p)
      keys_.copy_in_order(run, p, p == rank ? own : slot(p), only(ordered_));
  }

  /// Memory for this rank's keys, if those of the others are not received in gathered_.
  KeyBlock copied_keys() const {
    return {gathered_.k, gathered_.k + keys_.block_rows() * keys_.key_bytes(), starts_, nullptr};
  }

  /// The slot that receives the keys of a rank, in memory with `most` rows for each.
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

  LayerContext layer_;
  TravellingKeys keys_;
  std::optional<KeyGradients> gradients_;  // with Options::gradients
  std::optional<KeyPuts> puts_;            // with several ranks, for the runs that it supports
  Route route_;                            // for the runs that those do not support
  Underway underway_;
  std::optional<StateMemory> states_;  // one slot
  KeyBlock gathered_;  // [ranks, rows of a rank] as received; on GPUs keys and values use the same
                       // memory, one after the other
  std::int64_t* starts_ = nullptr;     // [ranks, batch] of the sequences in each rank's slot
  kernels::KeySpan* spans_ = nullptr;  // [most_keys()] on CPUs
  KeyBlock ordered_;                   // whole sequences, in their order; on CPUs only their starts
};

std::string refusal(const Options& options, int ranks) {
  if (std::string parts = refuse_parts(options); !parts.empty()) return parts;
  if (ranks == 1) return "";
  if (std::string keys = refuse_travelling_keys(options, ranks); !keys.empty()) return keys;
  if (options.exchange == Exchange::peer_buffers_apart)
    return fmt::format("it sends keys, and does not take exchange {}", name(options.exchange));
  return "";
}

/// Counts the keys and values of all ranks, as received and, on GPUs, in the order of the sequence
/// (memory that other GPUs write if they can reach it).
RunCost cost(const Options& options, int ranks, const RunSize& size, Device device) {
  const double own_rows = options.queries ? size.most_tokens : size.tokens;
  const double states = own_rows * state_row_bytes(options);
  const double gradients = KeyGradients::workspace_bytes(options, ranks, size);
  if (ranks == 1) return {.workspace_bytes = states + gradients};
  const double row = key_row_bytes(options);
  const double come = ranks * most_keys_of_a_rank(options.keys, size.keys, ranks);
  RunCost cost{.received_bytes = (ranks - 1) * size.keys / ranks * row,
               .messages = options.values_in_keys ? 1.0 : 2.0,
               .work = options.queries ? 1.0 / ranks : 1.0,
               .backward = KeyGradients::cost(options, ranks, size)};
  if (device == Device::host) {
    cost.workspace_bytes = states + come * row + size.keys * sizeof(kernels::KeySpan) + gradients;
    return cost;
  }
  const double wider = row * std::max(options.head_dim, options.of_values()) /
                       (options.head_dim + (options.values_in_keys ? 0 : options.of_values()));
  cost.workspace_bytes = std::max(states, come * wider) + size.keys * row + gradients;
  if (ranks <= PeerView::kMostRanks && options.exchange != Exchange::gather) {
    const int pieces = pieces_of_keys(options.heads, options.kv_heads, come / ranks * row).count;
    cost.messages = cost.peer_messages = 2;
    // While the first piece arrives, rows attend to own keys; with many ranks these are few.
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
          .gradients = GradientsOf::sharded_queries,
          .takes_tables = false,
          .takes_fp64 = true,
          .balanced =
              [](const Options& options) {
                return options.queries ? Balanced::by_queries : Balanced::evenly;
              },
          .refusal = refusal,
          .cost = cost,
          .make = [](const LayerContext& layer) -> std::unique_ptr<Strategy> {
            return std::make_unique<GatherKv>(layer);
          }};
}

}  // namespace longspan
