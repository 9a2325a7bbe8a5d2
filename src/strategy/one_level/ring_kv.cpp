// The strategy ring-kv: keys and values travel around, one rank's at a time, beside the compute.
//
//     state = attend(my rows, my keys),   then for s = 1 ... P - 1:
//     state = attend(my rows, keys of rank - s) from state      while those of rank - s - 1 come
//     the last of them ends with the result
//
// Every rank sends its own keys, in step s to rank + s, so what no row of a rank sees is neither
// sent to it nor waited for. A rank keeps two blocks of keys besides what it was given. Where its
// own keys have to be copied before they can be sent, one of the two holds them: a block then comes
// in when the one before it is no longer needed, and only the first comes beside compute.
//
// On GPUs that reach each other the blocks are in a receive buffer, which copy engines fill while
// all multiprocessors compute. There the step alone says which block it fills, as a sender has to
// know it, and a copy of own keys has a block of its own (none with Limits::dense_keys). Where the
// blocks of all steps are small, each has its own, and all keys set out at once: then a step waits
// for the link alone, and not for a block that a peer still attends to.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "src/strategy/shared/receive_memory.hpp"
#include "src/strategy/shared/state_memory.hpp"
#include "src/strategy/shared/travelling_keys.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {
namespace {

constexpr int kMostBlocks = 2;
constexpr std::int64_t kSmallBytes = 64 << 20;  // of blocks for all steps, in a receive buffer

class RingKv final : public Strategy {
 public:
  explicit RingKv(const Layer& layer)
      : layer_(layer), keys_(layer), steps_(static_cast<std::size_t>(layer.comm.size())) {
    layer_.bounds.resume = layer_.comm.size() > 1;
    open_receive_buffer();
    states_.emplace(layer_.kernels, layer_.bounds);
    for (int s = 1; s < layer_.comm.size(); ++s)
      steps_[s].name = fmt::format("ring of keys, step {} of {}", s, layer_.comm.size() - 1);
  }

  void lay_out(Parts& memory) override {
    states_->lay_out(memory);
    if (layer_.comm.size() == 1) return;
    keys_.lay_out(memory);
    if (!receive_buffer_) {
      take_blocks(memory, kMostBlocks);
      copy_ = blocks_[0];
    } else if (!layer_.options.limits.dense_keys) {
      copy_ = keys_.take_block(memory, keys_.block_rows());
    }
  }

  ExchangeInfo exchange() const override { return exchange_; }

  /// Two phases a step, two ahead of the first, one for the merge and one for the end.
  int most_marks() const override { return 2 * layer_.comm.size() + 4; }

  void prepare(Pass& pass) override {
    keys_.check(pass.run, "ring-kv");
    pass.keys_travel = layer_.comm.size() > 1;
    states_->give(pass);
  }

  void queue(Pass& pass) override {
    const Run& run = pass.run;
    const int ranks = layer_.comm.size();
    run.enter(Phase::attend);
    if (ranks == 1) return pass.attend_to(pass.merge, Phase::merge, layer_.kernels);
    // What ranks say comes into the receive buffer with their keys.
    if (receive_buffer_) pass.compare_in(words_, layer_.comm.rank());
    pass.say_to(layer_.kernels);
    keys_.begin(pass);
    const KeyBlock own = keys_.own_keys(run, copy_);
    last_ = plan(run, !receive_buffer_ && own.k == copy_.k);

    comm::Transfer word;  // what ranks say of the run, where no step says it
    if (pass.said && !receive_buffer_) {
      run.enter(Phase::exchange);
      word = layer_.comm.start_all_gather(nullptr, nullptr, 0, run.stream,
                                          "ring of keys, agreement", pass.said);
    }
    Moves moves(ranks);
    for (int step = 0;;) {
      // The result is made of what all ranks mean alike.
      if (step == last_) hear_all(run, step, own, word, moves);
      int next = next_step(step);
      if (receive_buffer_ && step == last_) next = ranks;
      attend_beside(pass, step, next, own, moves);
      if (next == ranks) break;
      run.enter(Phase::exchange);
      word.wait(run.stream);
      moves.of(next).wait(run.stream);
      step = next;
    }
    word.wait(run.stream);
  }

 private:
  struct Step {
    std::string name;
    bool sends = false;
    bool receives = false;
    int block = 0;  // that it fills
  };
  /// The transfers of a run.
  struct Moves {
    explicit Moves(int ranks) : steps(static_cast<std::size_t>(ranks)) {}
    comm::Transfers& of(int step) { return steps[static_cast<std::size_t>(step)]; }

    std::vector<comm::Transfers> steps;  // by distance
    int started = 0;                     // the last step that has set out
  };

  /// Opens a receive buffer for the blocks where the GPUs reach each other, or they are not asked
  /// to.
  void open_receive_buffer() {
    if (layer_.comm.size() == 1 || layer_.options.exchange == Exchange::gather) return;
    const int steps = layer_.comm.size() - 1;
    const std::int64_t block = keys_.block_rows() * (keys_.key_bytes() + keys_.value_bytes());
    const int count = steps * block <= kSmallBytes ? steps : std::min(kMostBlocks, steps);
    receive_buffer_ = open_receive_memory(layer_, exchange_, [&](Parts& memory) {
      take_blocks(memory, count);
      words_ = memory.take_array<std::uint64_t>(static_cast<std::size_t>(layer_.comm.size()));
    });
  }

  void take_blocks(Parts& memory, int count) {
    blocks_.clear();
    for (int i = 0; i < count; ++i) blocks_.push_back(keys_.take_block(memory, keys_.block_rows()));
  }

  /// Whether every step has a block of its own, so that all may move at once.
  bool all_at_once() const { return receive_buffer_ && blocks_.size() + 1 == steps_.size(); }

  static bool share_a_block(const Step& one, const Step& other) {
    return one.receives && other.receives && one.block == other.block;
  }

  int rank_at(int distance) const {
    return (layer_.comm.rank() + distance + layer_.comm.size()) % layer_.comm.size();
  }

  /// Finds what moves in each step; returns the last step that brings keys, or 0. `copied`: the
  /// first block holds this rank's own keys.
  int plan(const Run& run, bool copied) {
    const int own = layer_.comm.rank(), count = static_cast<int>(blocks_.size());
    int last = 0, received = 0;
    for (int s = 1; s < layer_.comm.size(); ++s) {
      Step& step = steps_[s];
      step.sends = keys_.are_seen(run, rank_at(s), own);
      step.receives = keys_.are_seen(run, own, rank_at(-s));
      step.block = receive_buffer_ ? (s - 1) % count : copied ? 1 : received % count;
      if (!step.receives) continue;
      ++received;
      last = s;
    }
    return last;
  }

  /// The next step in which something moves here; the number of ranks where there is none.
  int next_step(int step) const {
    do ++step;
    while (step < layer_.comm.size() && !receive_buffer_ && !steps_[step].sends &&
           !steps_[step].receives);
    return step;
  }

  /// Waits for the words of all ranks. In a receive buffer they come with the steps, and so this
  /// rank moves all that is left.
  void hear_all(const Run& run, int step, const KeyBlock& own, comm::Transfer& word,
                Moves& moves) const {
    word.wait(run.stream);
    if (!receive_buffer_) return;
    for (step = next_step(step); step < layer_.comm.size(); step = next_step(step)) {
      if (step > moves.started) start(run, step, own, moves);
      moves.of(step).wait(run.stream);
    }
  }

  /// Attends to the keys that step `step` has brought, those of this rank in step 0, while those of
  /// step `next` come; where they come into the same block, they come afterwards.
  void attend_beside(Pass& pass, int step, int next, const KeyBlock& own, Moves& moves) const {
    const Run& run = pass.run;
    const int ranks = layer_.comm.size();
    const bool attends = step == 0 || steps_[step].receives;
    const bool sets_out = next < ranks && next > moves.started;
    const int end = all_at_once() ? ranks : next + 1;  // of the steps that start now
    const bool waits = sets_out && step > 0 && share_a_block(steps_[step], steps_[next]);
    const bool beside = sets_out && !waits;
    // Copy engines need no place among the multiprocessors, and the kernel is what takes longest.
    const bool kernel_first = beside && receive_buffer_ && attends;
    const auto start_next = [&] {
      for (int s = next; s < end; ++s) start(run, s, own, moves);
    };
    const auto attend_now = [&] {
      if (!attends) return;
      run.enter(Phase::attend);
      if (step > 0) give(pass, rank_at(-step), blocks_[steps_[step].block]);
      attend(pass, step == last_, next < ranks ? &moves.of(next) : nullptr);
    };
    if (kernel_first) return queue_first(run.stream, attend_now, end - next, start_next);
    if (beside) start_next();
    attend_now();
    if (waits) start_next();
  }

  /// Queues attend(), and then start(), which starts `starts` transfers that wait for what the
  /// stream has now, and not for the attention. Where either throws, no later transfer begins early
  /// for it.
  template <class Attend, class Start>
  void queue_first(Stream stream, const Attend& attend, int starts, const Start& start) const {
    layer_.comm.keep_place(stream, starts);
    try {
      attend();
      start();
    } catch (...) {
      layer_.comm.forget_place();
      throw;
    }
  }

  /// Starts what moves in a step: keys, values, where listed keys stand, and, into a receive
  /// buffer, what this rank says of the run.
  void start(const Run& run, int step, const KeyBlock& own, Moves& moves) const {
    const Step& how = steps_[step];
    const KeyBlock& to = blocks_[how.block];
    const int rank = layer_.comm.rank(), from = rank_at(-step);
    const auto bytes = [&](bool is_moved, int owner, std::int64_t row_bytes) {
      return is_moved ? static_cast<std::size_t>(keys_.rows_of(run, owner) * row_bytes) : 0;
    };
    std::array<comm::Piece, comm::Transfers::kMost> pieces;
    std::size_t count = 0;
    const auto move = [&](const void* sent, void* received, std::int64_t row_bytes) {
      pieces[count++] = {sent, bytes(how.sends, rank, row_bytes), received,
                         bytes(how.receives, from, row_bytes)};
    };
    move(own.k, to.k, keys_.key_bytes());
    move(own.v, to.v, keys_.value_bytes());
    if (to.positions != nullptr) move(own.positions, to.positions, sizeof(std::int64_t));
    if (receive_buffer_)
      pieces[count++] = {words_ + rank, sizeof *words_, words_ + from, sizeof *words_,
                         words_ + rank};
    moves.of(step) =
        layer_.comm.start_shifts({pieces.data(), count}, step, run.stream, how.name.c_str());
    moves.started = step;
  }

  /// Makes the keys of rank `rank`, which have come, those of the run.
  void give(Pass& pass, int rank, const KeyBlock& block) const {
    keys_.find_starts(pass.run, rank, block);
    keys_.attend_to(pass, block, keys_.shard_of(pass.run, rank, block));
    pass.attend.resume = true;
  }

  void attend(const Pass& pass, bool is_last, comm::Transfers* coming) const {
    const kernels::BetweenTiles between = [coming] {
      if (coming != nullptr) let_go_on(*coming);
    };
    if (is_last)
      pass.attend_to(pass.merge, Phase::merge, layer_.kernels, between);
    else
      layer_.kernels.attend(pass.attend, kernels::StateEpilogue{}, pass.run.stream, {}, between);
  }

  /// What it finds wrong ends the communicator, and is thrown by the wait.
  static void let_go_on(comm::Transfers& coming) noexcept {
    try {
      coming.test();
    } catch (...) {
    }
  }

  Layer layer_;
  TravellingKeys keys_;
  std::vector<Step> steps_;  // of the run at hand, by distance
  int last_ = 0;             // the step of the run at hand whose keys end it; 0: its own do
  std::optional<StateMemory> states_;  // one slot
  std::vector<KeyBlock> blocks_;       // that keys come into
  KeyBlock copy_;                      // of this rank's own keys
  std::shared_ptr<std::byte>
      receive_buffer_;              // of blocks and words; null: blocks are the layer's memory
  std::uint64_t* words_ = nullptr;  // [ranks] what each rank says of the run
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
  if (ranks == 1) return {.workspace_bytes = states};
  const double row = key_row_bytes(options), received = (ranks - 1) * size.keys / ranks * row;
  const double block = most_keys_of_a_rank(options.keys, size.keys, ranks);
  const bool by_peers = device != Device::host && options.exchange != Exchange::gather;
  return {.received_bytes = received,
          .workspace_bytes = states + 2 * block * row,
          .overlapped_bytes = received,
          .messages = ranks - 1.0,
          .peer_messages = by_peers ? ranks - 1.0 : 0,
          .work = 1.0 / ranks,
          .calls = static_cast<double>(ranks),
          .merged_bytes = (ranks - 1) * states};
}

}  // namespace

StrategyEntry ring_kv() {
  return {.info = {"ring-kv", "its own rows", "its own rows",
                   "(P-1)/P S kv_heads (head_dim + value_dim) b"},
          .preference = 3,
          .keeps_order = [](const Options&, int) { return false; },
          .takes_tables = false,
          .balanced = [](const Options&) { return Balanced::by_queries; },
          .refusal = refusal,
          .cost = cost,
          .make = [](const Layer& layer) -> std::unique_ptr<Strategy> {
            return std::make_unique<RingKv>(layer);
          }};
}

}  // namespace longspan
