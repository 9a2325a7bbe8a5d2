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

/// The ranks of one side: `count` ranks from `first` on, 0 for all.
CacheRanks cache_ranks(nb::handle keys, const char* keys_name, nb::handle first, nb::handle count,
                       const char* ranks_name, nb::handle table, const char* table_name,
                       std::size_t sequences) {
  CacheRanks made;
  made.rule = sharding_of(keys, keys_name);
  made.first_rank = small(integer(first, ranks_name), ranks_name);
  made.ranks = small(integer(count, ranks_name), ranks_name);
  made.table = table_of(Array(table, table_name, DType::int64), table_name, sequences);
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

  void run(nb::handle k, nb::handle v, nb::handle block_table, nb::handle to_k, nb::handle to_v,
           nb::handle to_block_table, nb::handle stream) {
    Array keys(k, "k"), values(v, "v");
    const Array to_keys(to_k, "to_k"), to_values(to_v, "to_v");
    const Array& any = keys ? keys : to_keys;
    queue_ = any ? stream_of(stream, any) : Stream{};
    const Array table(Array::table(block_table, "block_table", queue_)),
        to_table(Array::table(to_block_table, "to_block_table", queue_));
    for (const Array* array : {&std::as_const(keys), &std::as_const(values), &to_keys, &to_values})
      array->floats();
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

  void wait(nb::handle stream) {
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

Move* make_move(nb::handle comm, nb::handle lengths, nb::handle kv_heads, nb::handle head_dim,
                nb::handle value_dim, nb::handle dtype, nb::handle keys, nb::handle first,
                nb::handle count, nb::handle table, nb::handle to_keys, nb::handle to_first,
                nb::handle to_count, nb::handle to_table, nb::handle threads) {
  ReshardOptions o;
  o.lengths = values_of(Array(lengths, "lengths", DType::int64), "lengths");
  o.kv_heads = small(integer(kv_heads, "kv_heads"), "kv_heads");
  o.head_dim = small(integer(head_dim, "head_dim"), "head_dim");
  if (!value_dim.is_none()) o.value_dim = small(integer(value_dim, "value_dim"), "value_dim");
  o.dtype = dtype_of(dtype, "dtype");
  const std::size_t sequences = o.lengths.size();
  o.from = cache_ranks(keys, "keys", first, count, "ranks", table, "key_table", sequences);
  o.to = cache_ranks(to_keys, "to_keys", to_first, to_count, "to_ranks", to_table, "to_key_table",
                     sequences);
  o.threads = small(integer(threads, "threads"), "threads");
  const nb::object held = comm_or_default(comm, Device::host, -1);
  return new Move(held, o);
}

}  // namespace

void bind_reshard(nb::module_& m) {
  nb::class_<Move> move(m, "Move");
  def_by_position(move, "run", &Move::run, Function::reshard);
  def_by_position(move, "wait", &Move::wait, Function::reshard);
  move.def("comm", &Move::comm)
      .def("workspace_bytes", &Move::workspace_bytes)
      .def("traffic", &Move::traffic);
  def_by_position(m, "move", &make_move, Function::reshard);
}

}  // namespace longspan::python
