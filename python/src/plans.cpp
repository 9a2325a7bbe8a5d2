#include "python/src/plans.hpp"

#include <bit>
#include <cstring>
#include <iterator>
#include <limits>
#include <tuple>
#include <utility>

#include "longspan/error.hpp"

namespace longspan::python {
namespace {

/// Every field that cross_rank_merge() sets.
auto fields(const MergeOptions& o) {
  return std::tuple(o.heads, o.value_dim, o.dtype, o.of_out(), o.max_tokens, o.scatter_heads,
                    o.nan_is_empty);
}

/// The entry that fits, or else a new one. It moves to the front; the last of too many is dropped.
template <class Entry, class Fits, class Make>
Entry& kept(std::list<std::unique_ptr<Entry>>& entries, const Fits& fits, const Make& make) {
  for (auto entry = entries.begin(); entry != entries.end(); ++entry)
    if (fits(**entry)) {
      if (entry != entries.begin()) entries.splice(entries.begin(), entries, entry);
      return *entries.front();
    }
  std::unique_ptr<Entry> made = make();
  if (entries.size() == KeptLayers::kMost) entries.pop_back();
  entries.push_front(std::move(made));
  return *entries.front();
}

}  // namespace

std::int64_t rounded_up(std::int64_t n) {
  if (n <= 1) return 1;
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(n)));
}

Tensor UniformArrays::take(Device device, std::int64_t count, std::int64_t first,
                           std::int64_t step) {
  if (first + step * count > std::numeric_limits<std::int32_t>::max())
    throw InputError("the batch has " + std::to_string(first + step * count) +
                     " rows or keys in a sequence; at most 2^31 - 1 are supported");
  const auto view = [&](const Entry& e) {
    return Tensor(e.memory.data(), DType::int32, {count}, device);
  };
  for (auto e = entries_.begin(); e != entries_.end(); ++e)
    if (e->count == count && e->first == first && e->step == step) {
      entries_.splice(entries_.begin(), entries_, e);
      return view(*e);
    }
  std::vector<std::int32_t> values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i)
    values[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(first + i * step);
  constexpr std::size_t kMost = 8;
  if (entries_.size() == kMost) entries_.pop_back();
  entries_.push_front({count, first, step, Buffer(device, values.size() * sizeof values[0])});
  entries_.front().memory.upload(values.data());
  return view(entries_.front());
}

Tensor UniformArrays::steps(Device device, std::int64_t count, std::int64_t step) {
  return take(device, count, 0, step);
}
Tensor UniformArrays::constant(Device device, std::int64_t count, std::int64_t value) {
  return take(device, count, value, 0);
}

Tensor UniformArrays::table(Device device, const std::vector<std::int64_t>& values,
                            std::int64_t rows) {
  const auto columns = static_cast<std::int64_t>(values.size());
  const auto view = [&](const Table& t) {
    return rows > 1 ? Tensor(t.memory.data(), DType::int64, {rows, columns}, device)
                    : Tensor(t.memory.data(), DType::int64, {columns}, device);
  };
  for (auto t = tables_.begin(); t != tables_.end(); ++t)
    if (t->rows == rows && t->values == values) {
      tables_.splice(tables_.begin(), tables_, t);
      return view(*t);
    }
  std::vector<std::int64_t> all;
  for (std::int64_t r = 0; r < rows; ++r) all.insert(all.end(), values.begin(), values.end());
  constexpr std::size_t kMost = 8;
  if (tables_.size() == kMost) tables_.pop_back();
  tables_.push_front({values, rows, Buffer(device, all.size() * sizeof all[0])});
  tables_.front().memory.upload(all.data());
  return view(tables_.front());
}

KeptLayer& KeptLayers::find(const Communicator& world, const Options& options) {
  return kept(
      kept_layers_, [&](const KeptLayer& kept) { return kept.options == options; },
      [&] { return std::make_unique<KeptLayer>(world, options); });
}

CrossRankMerge& KeptLayers::find(const Communicator& world, const MergeOptions& options,
                                 LogBase base) {
  return kept(
      merges_,
      [&](const CrossRankMerge& merge) {
        return merge.base() == base && fields(merge.options()) == fields(options);
      },
      [&] { return std::make_unique<CrossRankMerge>(world, options, base); });
}

void KeptLayers::wait(Stream stream) {
  for (const auto& kept : kept_layers_) kept->layer.wait(stream);
  for (const auto& merge : merges_) merge->wait(stream);
}

}  // namespace longspan::python
