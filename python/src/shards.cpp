#include "python/src/shards.hpp"

#include <nanobind/stl/optional.h>

#include <string>
#include <vector>

#include "longspan/error.hpp"
#include "longspan/shard.hpp"
#include "python/src/arrays.hpp"
#include "python/src/words.hpp"

namespace longspan::python {
namespace {

/// A Shard with its table, if it has one.
struct OwnShard {
  Shard shard;
  std::vector<std::int64_t> table;

  Shard get() const {
    Shard made = shard;
    made.table = table.empty() ? nullptr : table.data();
    return made;
  }
  std::int64_t count() const { return get().local_len(shard.length); }
};

OwnShard resolve(const Sharding& sharding, nb::handle length, nb::handle rank, nb::handle ranks,
                 nb::handle table) {
  const std::int64_t all = integer(length, "length"), count = integer(ranks, "ranks"),
                     own = integer(rank, "rank");
  constexpr std::int64_t kMost = 1 << 20;
  if (count < 1 || count > kMost)
    throw InputError("ranks is " + std::to_string(count) + "; there are 1 to 2^20");
  if (own < 0 || own >= count)
    throw InputError("rank is " + std::to_string(own) + "; of " + std::to_string(count) +
                     " ranks there are 0 to " + std::to_string(count - 1));
  const Array given(table, "table", DType::int64);
  OwnShard made{{}, values_of(given, "table")};
  const auto entries = static_cast<std::int64_t>(made.table.size());
  const bool is_ranges = sharding.layout == Layout::ranges,
             is_listed = sharding.layout == Layout::listed;
  if (bool{given} != (is_ranges || is_listed))
    throw InputError(std::string("table is ") + (given ? "given" : "None") +
                     ", and the layout is " + name(sharding.layout) +
                     "; ranges and listed have one");
  if (is_ranges) {
    if (entries != count + 1 || made.table.front() != 0 || made.table.back() != all)
      throw InputError("table has " + std::to_string(entries) + " entries; ranges of " +
                       std::to_string(count) + " ranks have " + std::to_string(count + 1) +
                       ", from 0 to length");
    for (std::int64_t r = 0; r < count; ++r)
      if (made.table[static_cast<std::size_t>(r)] > made.table[static_cast<std::size_t>(r) + 1])
        throw InputError("table descends at rank " + std::to_string(r));
  }
  if (is_listed)
    for (const std::int64_t position : made.table)
      if (position < 0 || position >= all)
        throw InputError("table has position " + std::to_string(position) + "; there are 0 to " +
                         std::to_string(all - 1));
  made.shard = sharding.resolve(all, static_cast<int>(own), static_cast<int>(count), nullptr,
                                is_listed ? entries : 0);
  return made;
}

std::vector<std::int64_t> positions_of(const OwnShard& own) {
  const Shard shard = own.get();
  std::vector<std::int64_t> positions(static_cast<std::size_t>(own.count()));
  for (std::size_t i = 0; i < positions.size(); ++i)
    positions[i] = shard.position(static_cast<std::int64_t>(i), shard.length);
  return positions;
}

/// memoryview of int64, which NumPy and torch take without a copy.
nb::object positions_view(const OwnShard& own) {
  const std::vector<std::int64_t> positions = positions_of(own);
  const nb::object memory =
      nb::steal(PyByteArray_FromStringAndSize(reinterpret_cast<const char*>(positions.data()),
                                              static_cast<Py_ssize_t>(positions.size() * 8)));
  if (!memory.is_valid()) throw nb::python_error();
  const nb::object view = nb::steal(PyMemoryView_FromObject(memory.ptr()));
  if (!view.is_valid()) throw nb::python_error();
  return view.attr("cast")("q");
}

nb::list intervals(const OwnShard& own) {
  nb::list made;
  const std::vector<std::int64_t> positions = positions_of(own);
  for (std::size_t i = 0; i < positions.size();) {
    std::size_t end = i + 1;
    while (end < positions.size() && positions[end] == positions[end - 1] + 1) ++end;
    made.append(nb::make_tuple(positions[i], positions[end - 1] + 1));
    i = end;
  }
  return made;
}

}  // namespace

std::vector<std::int64_t> values_of(const Array& array, const char* name) {
  std::vector<std::int64_t> values;
  if (!array) return values;
  const Tensor& t = array.tensor();
  if (t.device != Device::host || t.dims != 1 || t.dtype != DType::int64)
    throw InputError(std::string(name) + " is not a vector of int64 in CPU memory");
  for (std::int64_t i = 0; i < t.shape[0]; ++i)
    values.push_back(static_cast<const std::int64_t*>(t.data)[i * t.stride[0]]);
  return values;
}

void bind_shards(nb::module_& m) {
  nb::class_<OwnShard>(m, "Shard",
                       "What one rank holds of a sequence. len(shard) is the number of its tokens.")
      .def_prop_ro("layout", [](const OwnShard& s) { return name(s.shard.layout); })
      .def_prop_ro("block", [](const OwnShard& s) { return s.shard.block; })
      .def_prop_ro("rank", [](const OwnShard& s) { return s.shard.rank; })
      .def_prop_ro("ranks", [](const OwnShard& s) { return s.shard.ranks; })
      .def_prop_ro(
          "length", [](const OwnShard& s) { return s.shard.length; },
          "Tokens of the whole sequence.")
      .def("__len__", &OwnShard::count)
      .def("positions", &positions_view,
           "Where each of the rank's own tokens stands in the sequence: a memoryview of int64, "
           "which\n"
           "numpy.asarray and torch.asarray take without a copy.")
      .def("intervals", &intervals,
           "The same as a list of (start, stop), in the order of the rank's own tokens.")
      .def("__repr__", [](const OwnShard& s) {
        return "<longspan.Shard " + std::to_string(s.count()) + " of " +
               std::to_string(s.shard.length) + " tokens, " + name(s.shard.layout) + ", rank " +
               std::to_string(s.shard.rank) + " of " + std::to_string(s.shard.ranks) + ">";
      });

  nb::class_<Sharding>(
      m, "Sharding",
      "Sharding(layout='contiguous', block=128)\n\n"
      "How a sequence is dealt out to the ranks: a rule without a rank. `layout` is one of\n"
      "contiguous, zigzag, striped, interleaved (in blocks of `block` tokens), ranges and listed.")
      .def(
          "__init__",
          [](Sharding* made, nb::handle layout, nb::handle block) {
            Sharding rule = sharding_of(layout, "layout");
            rule.block = integer(block, "block");
            Shard::checked({rule.layout, 0, 1, 0, rule.block});
            new (made) Sharding(rule);
          },
          nb::arg("layout").none() = "contiguous", nb::arg("block").none() = kSegment)
      .def_prop_ro("layout", [](const Sharding& s) { return name(s.layout); })
      .def_prop_ro("block", [](const Sharding& s) { return s.block; })
      .def(
          "shard", &resolve, nb::arg("length").none(), nb::arg("rank").none(),
          nb::arg("ranks").none(), nb::arg("table") = nb::none(),
          "What rank `rank` of `ranks` holds of a sequence of `length` tokens. `table`: of ranges\n"
          "the [ranks + 1] starts, of listed the positions of the rank's own tokens.")
      .def("__eq__",
           [](const Sharding& a, nb::handle other) {
             Sharding b;
             return nb::try_cast<Sharding>(other, b) && a.layout == b.layout && a.block == b.block;
           })
      .def("__hash__",
           [](const Sharding& s) { return static_cast<std::int64_t>(s.layout) + 8 * s.block; })
      .def("__reduce__",
           [](const Sharding& s) {
             return nb::make_tuple(nb::type<Sharding>(), nb::make_tuple(name(s.layout), s.block));
           })
      .def("__repr__", [](const Sharding& s) {
        return std::string("Sharding('") + name(s.layout) + "'" +
               (s.layout == Layout::interleaved ? ", block=" + std::to_string(s.block) : "") + ")";
      });
}

}  // namespace longspan::python
