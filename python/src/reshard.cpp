#include "python/src/reshard.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "longspan/error.hpp"
#include "longspan/reshard.hpp"
#include "python/src/arrays.hpp"
#include "python/src/call.hpp"
#include "python/src/communicators.hpp"
#include "python/src/dtypes.hpp"
#include "python/src/errors.hpp"
#include "python/src/shards.hpp"
#include "python/src/words.hpp"

namespace longspan::python {
namespace {

/// The starts of each sequence, [batch, ranks + 1], flat for one sequence, as in attend().
std::vector<std::int64_t> table_of(const Array& array, const char* name, std::size_t sequences) {
  const Tensor& t = array.tensor();
  if (!array || t.dims == 1) {
    if (array && sequences != 1)
      throw InputError(std::string(name) + " is [" + std::to_string(t.shape[0]) + "]; of " +
                       std::to_string(sequences) + " sequences [" + std::to_string(sequences) +
                       ", ranks + 1] is wanted");
    return values_of(array, name);
  }
  if (t.device != Device::host || t.dims != 2 || t.shape[0] != static_cast<std::int64_t>(sequences))
    throw InputError(std::string(name) + " has " + std::to_string(t.dims) + " dimensions, and " +
                     std::to_string(t.shape[0]) + " rows; on CPUs [" + std::to_string(sequences) +
                     ", ranks + 1] is wanted");
  std::vector<std::int64_t> values;
  for (std::int64_t b = 0; b < t.shape[0]; ++b)
    for (std::int64_t r = 0; r < t.shape[1]; ++r)
      values.push_back(static_cast<const std::int64_t*>(t.data)[b * t.stride[0] + r * t.stride[1]]);
  return values;
}

/// The ranks of one side: `count` ranks from `first` on, 0 for all. Python gives them as the range
/// `ranks_name`.
template <Literal kKeys, Literal kFirst, Literal kCount, Literal kTable>
CacheRanks cache_ranks(Argument<kKeys> keys, Argument<kFirst> first, Argument<kCount> count,
                       const char* ranks_name, Argument<kTable> table, std::size_t sequences) {
  CacheRanks made;
  made.rule = sharding_of(keys, keys.kName);
  made.first_rank = small(integer(first, ranks_name), ranks_name);
  made.ranks = small(integer(count, ranks_name), ranks_name);
  made.table = table_of(Array(table, DType::int64), table.kName, sequences);
  return made;
}

class Move {
 public:
  Move(nb::handle comm, const ReshardOptions& options) : held_(nb::borrow(comm)) {
    comm_of(held_).alone(
        [&](const Communicator& world) { move_ = std::make_unique<Reshard>(world, options); });
  }
  Move(const Move&) = delete;
  Move& operator=(const Move&) = delete;

  void run(Argument<"k"> k, Argument<"v"> v, Argument<"block_table"> block_table,
           Argument<"to_k"> to_k, Argument<"to_v"> to_v, Argument<"to_block_table"> to_block_table,
           Argument<"stream"> stream) {
    Array keys = Array::wide(k), values = Array::wide(v);
    const Array to_keys = Array::wide(to_k), to_values = Array::wide(to_v);
    const Array& any = keys ? keys : to_keys;
    queue_ = any ? stream_of(stream, any) : Stream{};
    const Array table(Array::table(block_table, queue_)),
        to_table(Array::table(to_block_table, queue_));
    for (const Array* array : {&std::as_const(keys), &std::as_const(values), &to_keys, &to_values})
      if (!is_latent_row(move_->options().dtype)) array->floats();
    DenseCopies copies(stream);
    if (!table) copies.take_unless_cache(keys, values);
    if (to_keys) to_keys.writable();
    if (to_values) to_values.writable();
    const int gpu = comm_of(held_).world().gpu();
    using Named = std::pair<const Array*, const char*>;
    for (const auto& [array, name] : {Named{&keys, "k"}, Named{&values, "v"},
                                      Named{&to_keys, "to_k"}, Named{&to_values, "to_v"}})
      require_gpu(*array, name, gpu);
    const ReshardArgs args{.from = {keys.tensor(), values.tensor(), table.tensor()},
                           .to = {to_keys.tensor(), to_values.tensor(), to_table.tensor()}};
    comm_of(held_).alone([&](const Communicator&) { move_->run(args, queue_); });
  }

  void wait(Argument<"stream"> stream) {
    const Stream queue = stream.is_none() ? queue_ : given_stream(stream);
    comm_of(held_).alone([&](const Communicator&) { move_->wait(queue); });
  }

  nb::object comm() { return held_; }
  std::size_t workspace_bytes() { return move_->workspace_bytes(); }
  nb::tuple traffic() {
    const ReshardTraffic t = move_->traffic();
    return nb::make_tuple(t.sent, t.received, t.kept);
  }

 private:
  nb::object held_;
  std::unique_ptr<Reshard> move_;
  Stream queue_;  // of the last run
};

Move* make_move(Argument<"comm"> comm, Argument<"lengths"> lengths, Argument<"kv_heads"> kv_heads,
                Argument<"head_dim"> head_dim, Argument<"value_dim"> value_dim,
                Argument<"dtype"> dtype, Argument<"keys"> keys, Argument<"first_rank"> first,
                Argument<"rank_count"> count, Argument<"key_table"> table,
                Argument<"to_keys"> to_keys, Argument<"to_first_rank"> to_first,
                Argument<"to_rank_count"> to_count, Argument<"to_key_table"> to_table,
                Argument<"threads"> threads) {
  ReshardOptions o;
  o.lengths = values_of(Array(lengths, DType::int64), lengths.kName);
  o.kv_heads = small(kv_heads);
  o.head_dim = small(head_dim);
  if (!value_dim.is_none()) o.value_dim = small(value_dim);
  o.dtype = dtype_of(dtype, dtype.kName);
  const std::size_t sequences = o.lengths.size();
  o.from = cache_ranks(keys, first, count, "ranks", table, sequences);
  o.to = cache_ranks(to_keys, to_first, to_count, "to_ranks", to_table, sequences);
  o.threads = small(threads);
  const nb::object held = comm_or_default(comm, Device::host, -1);
  return new Move(held, o);
}

}  // namespace

void bind_reshard(nb::module_& m) {
  nb::class_<Move> move(m, "Move");
  def_by_name(move, "run", &Move::run, Function::reshard);
  def_by_name(move, "wait", &Move::wait, Function::reshard);
  move.def("comm", &Move::comm)
      .def("workspace_bytes", &Move::workspace_bytes)
      .def("traffic", &Move::traffic);
  def_by_name(m, "move", &make_move, Function::reshard);
}

}  // namespace longspan::python
