// The strategy ring-kv: keys and values travel around the ring, one rank's at a time, beside the
// compute.
//
//     state = attend(my rows, my keys),   then for s = 1 ... P - 1:
//     state = attend(my rows, keys of rank - s) from state      while those of rank - s - 1 arrive
//     the last of them writes the result
//
// Every rank sends its own keys, in step s to rank + s. Keys that no row of a rank sees are neither
// sent to it nor waited for. A rank keeps two blocks of keys besides its inputs. If its own keys
// must be copied before they can be sent, one of the two holds them. A block then arrives when the
// one before it is no longer needed, and only the first transfer overlaps compute.
//
// On GPUs that reach each other the blocks are in a receive buffer, which copy engines fill while
// all multiprocessors compute. There the step alone determines the block, since the sender has to
// know it, and a copy of own keys has its own block (none with Limits::dense_keys). If the blocks
// of all steps are small, each has its own, and all transfers start at once: a step then waits only
// for the link, not for a block that a peer still attends to.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/strategy/route.hpp"
#include "src/strategy/shared/key_gradients.hpp"
#include "src/strategy/shared/receive_memory.hpp"
#include "src/strategy/shared/state_memory.hpp"
#include "src/strategy/shared/travelling_keys.hpp"
#include "src/strategy/shared/walk.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {
namespace {

constexpr int kMostBlocks = 2;
constexpr std::int64_t kSmallBytes = 64 << 20;  // of blocks for all steps, in a receive buffer

class RingKv final : public Strategy {
 public:
  explicit RingKv(const LayerContext& layer)
      : layer_(layer), keys_(layer), names_(1), route_(ranks()), underway_(ranks()) {
    layer_.bounds.resume = ranks() > 1;
    open_receive_buffer();
    states_.emplace(layer_.kernels, layer_.bounds);
    if (layer_.options.gradients) gradients_.emplace(layer_, keys_);
    for (int s = 1; s < ranks(); ++s)
      names_.push_back(fmt::format("ring of keys, step {} of {}", s, ranks() - 1));
  }

  void lay_out(Parts& memory) override {
    if (gradients_) gradients_->lay_out(memory);
    states_->lay_out(memory);
    if (ranks() == 1) return;
    keys_.lay_out(memory);
    if (!receive_buffer_) {
      take_blocks(memory, kMostBlocks);
      copy_ = blocks_[0];
    } else if (!layer_.options.limits.dense_keys) {
      copy_ = keys_.take_block(memory, keys_.block_rows());
    }
  }

  void backward(Pass& pass, const GradientArgs& args) override { gradients_->backward(pass, args); }

  ExchangeInfo exchange() const override { return exchange_; }

  /// Two phases per step, two before the first, one for the merge and one for the end.
  int most_marks() const override { return 2 * ranks() + 4; }

  void prepare(Pass& pass) override {
    keys_.check(pass.run, "ring-kv");
    pass.keys_travel = ranks() > 1;
    states_->give(pass);
  }

  void queue(Pass& pass) override {
    pass.run.enter(Phase::attend);
    if (ranks() == 1) return pass.attend_to(pass.merge, Phase::merge, layer_.kernels);
    // The ranks' reports of the run arrive in the receive buffer with their keys.
    if (receive_buffer_) pass.compare_in(digests_, layer_.comm.rank());
    pass.write_own_digest(layer_.kernels);
    keys_.begin(pass);
    const KeyBlock own = keys_.own_keys(pass.run, copy_);
    make_route(pass.run, !receive_buffer_ && own.k == copy_.k);
    if (pass.digests && !receive_buffer_) pass.run.enter(Phase::exchange);
    Forward forward(*this, pass, own);
    walk(route_, pass, layer_.comm, "ring of keys, agreement", underway_, forward);
  }

 private:
  /// Attends to each block starting from the state of the blocks before, and writes the result in
  /// the last visit.
  class Forward final : public Visitor {
   public:
    Forward(const RingKv& ring, Pass& pass, const KeyBlock& own)
        : ring_(ring), pass_(pass), own_(own) {}

    comm::Transfers start(const Move& move) override { return ring_.start(pass_.run, move, own_); }

    void visit(const Step& step, const kernels::BetweenTiles& between) override {
      const kernels::AttentionKernels& kernels = ring_.layer_.kernels;
      pass_.run.enter(Phase::attend);
      if (step.guest != Step::kOwn) ring_.give(pass_, step);
      if (step.ends)
        pass_.attend_to(pass_.merge, Phase::merge, kernels, between);
      else
        kernels.attend(pass_.attend, kernels::StateEpilogue{}, pass_.run.stream, {}, between);
    }

   private:
    const RingKv& ring_;
    Pass& pass_;
    const KeyBlock& own_;
  };

  int ranks() const { return layer_.comm.size(); }

  /// Opens a receive buffer for the blocks, if the GPUs reach each other and the options do not
  /// rule it out.
  void open_receive_buffer() {
    if (ranks() == 1 || layer_.options.exchange == Exchange::gather) return;
    const int steps = ranks() - 1;
    const std::int64_t block = keys_.block_rows() * (keys_.key_bytes() + keys_.value_bytes());
    const int count = steps * block <= kSmallBytes ? steps : std::min(kMostBlocks, steps);
    receive_buffer_ = open_receive_memory(layer_, exchange_, [&](Parts& memory) {
      take_blocks(memory, count);
      digests_ = memory.take_array<std::uint64_t>(static_cast<std::size_t>(ranks()));
    });
  }

  void take_blocks(Parts& memory, int count) {
    blocks_.clear();
    for (int i = 0; i < count; ++i) blocks_.push_back(keys_.take_block(memory, keys_.block_rows()));
  }

  int rank_at(int distance) const { return (layer_.comm.rank() + distance + ranks()) % ranks(); }

  /// Makes the route of this run. `copied`: the first block holds this rank's own keys.
  void make_route(const Run& run, bool copied) {
    Ring ring{.ranks = ranks(),
              .rank = layer_.comm.rank(),
              .slots = static_cast<int>(blocks_.size()),
              .by_copy_engines = receive_buffer_ != nullptr};
    if (copied) ring.slots = ring.first_slot = 1;
    make_ring(
        ring, [&](int owner, int receiver) { return keys_.are_seen(run, receiver, owner); },
        route_);
  }

  /// Starts the transfers of a step: keys, values, positions of listed keys and, into a receive
  /// buffer, this rank's report of the run.
  comm::Transfers start(const Run& run, const Move& step, const KeyBlock& own) const {
    const int rank = layer_.comm.rank(), from = rank_at(-step.distance);
    std::array<comm::Piece, TravellingKeys::kPieces + 1> pieces;
    std::size_t count = keys_.list_pieces(run, step, own, block(step.slot), pieces.data());
    if (step.has_digests)
      pieces[count++] = {digests_ + rank, sizeof *digests_, digests_ + from, sizeof *digests_,
                         digests_ + rank};
    return layer_.comm.start_shifts({pieces.data(), count}, step.distance, run.stream,
                                    names_[static_cast<std::size_t>(step.distance)].c_str());
  }

  /// Points the attention at the received keys of a guest.
  void give(Pass& pass, const Step& step) const {
    const int rank = rank_at(-step.guest);
    const KeyBlock& keys = block(step.slot);
    keys_.find_starts(pass.run, rank, keys);
    keys_.attend_to(pass, keys, keys_.shard_of(pass.run, rank, keys));
    pass.attend.resume = true;
  }

  const KeyBlock& block(int slot) const { return blocks_[static_cast<std::size_t>(slot)]; }

  LayerContext layer_;
  TravellingKeys keys_;
  std::optional<KeyGradients> gradients_;  // with Options::gradients
  std::vector<std::string> names_;         // of steps, by distance
  Route route_;                            // of the current run
  Underway underway_;
  std::optional<StateMemory> states_;  // one slot
  std::vector<KeyBlock> blocks_;       // that receive keys
  KeyBlock copy_;                      // of this rank's own keys
  std::shared_ptr<std::byte>
      receive_buffer_;                // of blocks and digests; null: blocks are the layer's memory
  std::uint64_t* digests_ = nullptr;  // [ranks] each rank's report of the run
  ExchangeInfo exchange_;
};

std::string refusal(const Options& options, int ranks) {
  if (std::string parts = refuse_parts(options); !parts.empty()) return parts;
  if (ranks == 1) return "";
  if (!options.queries)
    return "it shares the work by rows of the queries, which must be sharded (Options::queries)";
  if (std::string keys = refuse_travelling_keys(options, ranks); !keys.empty()) return keys;
  if (options.exchange == Exchange::peer_buffers_apart)
    return fmt::format("it sends keys, and does not take exchange {}", name(options.exchange));
  return "";
}

RunCost cost(const Options& options, int ranks, const RunSize& size, Device device) {
  const double states =
      (options.queries ? size.most_tokens : size.tokens) * state_row_bytes(options);
  const double gradients = KeyGradients::workspace_bytes(options, ranks, size);
  if (ranks == 1) return {.workspace_bytes = states + gradients};
  const double row = key_row_bytes(options), received = (ranks - 1) * size.keys / ranks * row;
  const double block = most_keys_of_a_rank(options.keys, size.keys, ranks);
  const bool by_peers = device != Device::host && options.exchange != Exchange::gather;
  return {.received_bytes = received,
          .workspace_bytes = states + 2 * block * row + gradients,
          .overlapped_bytes = received,
          .messages = ranks - 1.0,
          .peer_messages = by_peers ? ranks - 1.0 : 0,
          .work = 1.0 / ranks,
          .calls = static_cast<double>(ranks),
          .merged_bytes = (ranks - 1) * states,
          .backward = KeyGradients::cost(options, ranks, size)};
}

}  // namespace

StrategyEntry ring_kv() {
  return {.info = {"ring-kv", "its own rows", "its own rows",
                   "(P-1)/P S kv_heads (head_dim + value_dim) b"},
          .preference = 3,
          .keeps_order = [](const Options&, int) { return false; },
          .gradients = GradientsOf::sharded_queries,
          .takes_tables = false,
          .balanced = [](const Options&) { return Balanced::by_queries; },
          .refusal = refusal,
          .cost = cost,
          .make = [](const LayerContext& layer) -> std::unique_ptr<Strategy> {
            return std::make_unique<RingKv>(layer);
          }};
}

}  // namespace longspan
