// The strategy gather-kv: keys and values travel, and every rank attends to all of them.
//
//     my keys and values  ->  every rank's, in the order of the sequence  ->  one attention
//
// A rank attends with its own rows of the queries, which shares the work, or with all of them, and
// then has the bits of one rank alone. This is the plainest strategy: nothing overlaps.
#include <fmt/format.h>

#include <algorithm>

#include "longspan/error.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {
namespace {

/// The most keys that one rank has beyond an even share: a block of an interleaved shard, for one.
constexpr std::int64_t kUneven = 512;

std::int64_t share(std::int64_t keys, int ranks) { return (keys + ranks - 1) / ranks + kUneven; }

class GatherKv final : public Strategy {
 public:
  explicit GatherKv(const Layer& layer) : layer_(layer) {
    layer_.bounds.shard.rank = 0;  // that of the attention, which has all keys
    layer_.bounds.shard.ranks = 1;
    scratch_bytes_ = layer_.kernels.attend_scratch(layer_.bounds);
  }

  void lay_out(Parts& memory) override {
    const kernels::AttendParams& bounds = layer_.bounds;
    state_ = memory.take(static_cast<std::size_t>(
        kernels::StateSlots::bytes(bounds.tokens * bounds.heads, bounds.value_dim)));
    scratch_ = memory.take(scratch_bytes_);
    if (layer_.comm.size() == 1) return;
    const auto most = static_cast<std::size_t>(bounds.max_kv_len);
    const auto rows =
        static_cast<std::size_t>(layer_.comm.size() * share(bounds.max_kv_len, layer_.comm.size()));
    const int wider = std::max(bounds.head_dim, bounds.value_dim);
    gathered_ = memory.take(rows * static_cast<std::size_t>(row_bytes(wider)));
    for (int i = 0; i < 2; ++i)
      ordered_[i] = memory.take(most * static_cast<std::size_t>(row_bytes(dim_of(i))));
    row_map_ = memory.take_array<std::int64_t>(rows);
  }

  ExchangeInfo exchange() const override { return {Exchange::gather}; }

  void prepare(Run& run) const override {
    run.attend.scratch = scratch_;
    run.attend.scratch_bytes = scratch_bytes_;
    run.attend.state = {state_, run.attend.tokens * layer_.bounds.heads, layer_.bounds.value_dim,
                        1};
    run.merge.states = run.attend.state;
    if (run.attend.queries.layout == Layout::listed) refuse("listed query rows");
    if (layer_.comm.size() > 1) check(run);
  }

  void queue(Run& run) const override {
    if (layer_.comm.size() > 1) {
      layer_.kernels.say(run.say, run.stream);
      run.enter(Phase::exchange);
      gather_keys(run);
    }
    run.enter(Phase::attend);
    run.attend_to(run.merge, Phase::merge, layer_.kernels);
  }

 private:
  /// Throws for a run that cannot be taken. All checks but the last give every rank the same
  /// answer, so that all of them refuse. A rank whose own rows have gaps refuses alone, as it does
  /// for any tensor that does not fit; the others find it missing.
  void check(const Run& run) const {
    const Shard& shard = run.arrays.keys;
    if (run.arrays.batch > 1) refuse(fmt::format("a batch of {} sequences", run.arrays.batch));
    if (run.args.kv_len) refuse("kv_len: it takes total_keys");
    if (run.args.block_table) refuse("block tables");
    if (run.args.new_k) refuse("new_k: append first");
    if (shard.layout == Layout::listed ||
        (shard.layout == Layout::ranges && layer_.kernels.device() != Device::host))
      refuse(fmt::format("{} keys", name(shard.layout)));
    const std::int64_t most = shard.max_local_len(shard.length);
    if (shard.length > layer_.bounds.max_kv_len ||
        most > share(layer_.bounds.max_kv_len, layer_.comm.size()))
      refuse(
          fmt::format("{} keys of which one rank has {}, in a layer that was made for {} "
                      "(max_kv_len), up to {} of them beyond an even share",
                      shard.length, most, layer_.bounds.max_kv_len, kUneven));
    const kernels::KvRows* const sources[] = {&run.attend.k, &run.attend.v};
    for (int i = 0; i < 2; ++i)
      if (sources[i]->head_stride != dim_of(i) || sources[i]->row_stride != row_elements(dim_of(i)))
        refuse("keys or values with gaps between their rows");
  }

  [[noreturn]] static void refuse(const std::string& what) {
    throw Unsupported("strategy gather-kv does not take " + what + "; gather-states does");
  }

  void gather_keys(Run& run) const {
    const kernels::RowKernels& kernels = layer_.rows;
    const Shard& shard = run.arrays.keys;
    const std::int64_t capacity = shard.max_local_len(shard.length);
    const kernels::Batch whole;  // one sequence, of the shard's length
    kernels.map_rows({shard, whole, shard.ranks, capacity, row_map_}, run.stream);
    kernels::KvRows* const sources[] = {&run.attend.k, &run.attend.v};
    for (int i = 0; i < 2; ++i) {
      const std::int64_t bytes = row_bytes(dim_of(i));
      std::byte* const mine = gathered_ + shard.rank * capacity * bytes;
      kernels.place_rows({static_cast<const std::byte*>(sources[i]->data), mine, nullptr,
                          shard.local_len(shard.length), bytes},
                         run.stream);
      layer_.comm.all_gather(mine, gathered_, static_cast<std::size_t>(capacity * bytes),
                             run.stream, i == 0 ? "gather of keys" : "gather of values", run.said);
      kernels.place_rows(
          {gathered_, ordered_[i], row_map_, shard.ranks * capacity, bytes, shard.length},
          run.stream);
      *sources[i] = {ordered_[i], row_elements(dim_of(i)), dim_of(i)};
    }
    run.attend.shard = {.length = shard.length};
  }

  /// The columns of a head of keys (0) or values (1).
  int dim_of(int i) const { return i == 0 ? layer_.bounds.head_dim : layer_.bounds.value_dim; }
  std::int64_t row_elements(int dim) const { return std::int64_t{layer_.bounds.kv_heads} * dim; }
  std::int64_t row_bytes(int dim) const {
    return row_elements(dim) * static_cast<std::int64_t>(size_of(layer_.bounds.kv_dtype));
  }

  Layer layer_;
  std::byte* state_ = nullptr;    // one slot
  std::byte* scratch_ = nullptr;  // AttentionKernels::attend_scratch
  std::size_t scratch_bytes_ = 0;
  std::byte* gathered_ = nullptr;    // [ranks, capacity, row_bytes] of keys, then of values
  std::byte* ordered_[2] = {};       // keys, values: [max_kv_len, row_bytes]
  std::int64_t* row_map_ = nullptr;  // [ranks, capacity] place of each gathered row
};

std::string refusal(const Options& options, int ranks) {
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
  const double element = static_cast<double>(size_of(options.dtypes.of_kv())) * options.kv_heads;
  const int columns = options.head_dim + options.of_values();
  const double capacity = size.keys / ranks + kUneven;
  return {.received_bytes = (ranks - 1) * size.keys / ranks * element * columns,
          .workspace_bytes = states + size.keys * element * columns +
                             ranks * capacity *
                                 (element * std::max(options.head_dim, options.of_values()) +
                                  sizeof(std::int64_t)),
          .messages = 2,
          .work = options.queries ? 1.0 / ranks : 1.0,
          .copied_bytes = 2 * size.keys * element * columns};
}

}  // namespace

StrategyEntry gather_kv() {
  return {.info = {"gather-kv", "all rows, or its own rows", "all rows, or its own rows",
                   "(P-1)/P S kv_heads (head_dim + value_dim) b"},
          .preference = 2,
          .keeps_order = true,
          .takes_every_run = false,
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
