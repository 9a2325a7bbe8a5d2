#include "src/agreement.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "longspan/element.hpp"

namespace longspan {
namespace {

constexpr OwnField kOwnFields[] = {
    {"Options::threads", "how many threads a rank has changes no bit and nothing that travels"},
    {"Options::profile", "a rank may time its own phases; what travels is the same"},
    {"Request::q", "its strides; rows, heads, dim and type are compared"},
    {"Request::k", "every rank has keys of its own, as its shard says"},
    {"Request::v", "as k"},
    {"Request::out", "where the result goes; its type is an option"},
    {"Request::lse", "a rank may leave it out"},
    {"Shard::rank", "compared with the communicator"},
    {"Shard::ranks", "compared with the communicator"},
    {"Shard::listed", "a listed table is one rank's own"},
    {"BlockTable::data", "pages are a rank's own; whether there is a table is compared"},
    {"BlockTable::columns", "as data"},
    {"BlockTable::row_stride", "as data"},
    {"BlockTable::column_stride", "as data"},
    {"QqBias::row_stride", "where the matrix lies; its width and values are compared"},
};

}  // namespace

std::span<const OwnField> own_fields() { return kOwnFields; }

void RunDescription::number(const char* name, std::int64_t value, Kind kind) {
  values_.at(count_++) = {name, value, kind};
}

void RunDescription::array(const char* name, const kernels::DigestArray& where, char type,
                           DType dtype) {
  if (where.data == nullptr) return;
  if (type == 'f') number(name, static_cast<std::int64_t>(dtype), Kind::dtype);
  Array& array = arrays_.at(array_count_++) = {name, where, type, dtype, {}, 0};
  if (!reads_arrays_) return;
  array.shown = static_cast<int>(std::min<std::int64_t>(where.size(), Array::kShown));
  for (int i = 0; i < array.shown; ++i) array.first[i] = where.bits(i);
}

void RunDescription::shard(const ShardNames& names, const Shard& shard, bool has_length,
                           std::int64_t batch) {
  number(names.layout, static_cast<std::int64_t>(shard.layout), Kind::layout);
  if (shard.layout == Layout::interleaved) number(names.block, shard.block);
  if (has_length) number(names.length, shard.length);
  const std::int64_t ends = std::int64_t{shard.ranks} + 1;
  if (shard.layout == Layout::ranges) array(names.table, {shard.table, ends, batch, ends, 8}, 'i');
}

RunDescription::RunDescription(const Request& r, const Options& o, bool reads_arrays)
    : reads_arrays_(reads_arrays) {
  // First what is always asked, so that lists of two ranks go on alike until a value differs.
  const auto given = [&](const char* name, const auto& field) {
    number(name, static_cast<bool>(field), Kind::given);
  };
  given("query_start", r.query_start);
  given("kv_len", r.kv_len);
  given("causal", r.causal);
  given("block_table", r.block_table);
  given("new_k", r.new_k);
  given("new_v", r.new_v);
  given("q_scale", r.q_scale);
  given("k_scale", r.k_scale);
  given("v_scale", r.v_scale);
  given("out_scale", r.out_scale);
  given("sinks", r.sinks);
  given("slopes", r.slopes);
  given("qq_bias", r.qq_bias);
  given("documents", r.documents);
  const std::int64_t batch = r.batch, documents = r.documents.count;
  const std::int64_t document_ends =
      documents < std::numeric_limits<std::int64_t>::max() ? documents + 1 : documents;
  number("batch", batch);
  number("skip_decode", r.skip_decode, Kind::yes_no);
  if (!o.shard_queries) number("rows of q", r.q.shape[0]);
  // With kv_len the shard's own length is not used.
  shard({"shard.layout", "shard.block", "shard.length", "shard.table"}, r.shard,
        r.kv_len == nullptr, batch);
  if (o.shard_queries)
    shard({"query_shard.layout", "query_shard.block", "query_shard.length", "query_shard.table"},
          r.query_shard, true, 1);
  array("query_start", {r.query_start, batch + 1, 1, 0, 4}, 'i');
  array("kv_len", {r.kv_len, batch, 1, 0, 4}, 'i');
  array("causal", {r.causal, batch, 1, 0, 1}, 'u');
  for (const auto& [name, scales] :
       {std::pair{"q_scale", r.q_scale}, std::pair{"k_scale", r.k_scale},
        std::pair{"v_scale", r.v_scale}})
    array(name, {scales.data, scales.per_head ? o.kv_heads : 1, 1, 0, 4}, 'f');
  array("out_scale", {r.out_scale, 1, 1, 0, 4}, 'f');
  for (const auto& [name, floats] : {std::pair{"sinks", r.sinks}, std::pair{"slopes", r.slopes}})
    array(name, {floats.data, o.heads, 1, 0, static_cast<int>(size_of(floats.dtype))}, 'f',
          floats.dtype);
  const QqBias& qq = r.qq_bias;
  array("qq_bias",
        {qq.values.data, qq.width, qq.width, qq.row_stride,
         static_cast<int>(size_of(qq.values.dtype))},
        'f', qq.values.dtype);
  if (qq) number("qq_bias.width", qq.width);
  array("documents", {r.documents.start, document_ends, 1, 0, 8}, 'i');
  if (r.documents) number("documents.count", documents);
}

std::uint64_t RunDescription::hash() const {
  // Which field comes next follows from the values before it, so the names need no part in it.
  std::uint64_t hash = 0;
  for (int i = 0; i < count_; ++i)
    hash = kernels::mix(hash + static_cast<std::uint64_t>(values_[i].value) + 1);
  for (int i = 0; i < array_count_; ++i)
    hash = kernels::mix(hash + static_cast<std::uint64_t>(arrays_[i].where.size()));
  return hash;
}

kernels::DigestParams RunDescription::arrays(std::uint64_t* words) const {
  kernels::DigestParams p;
  p.count = array_count_;
  p.words = words;
  for (int i = 0; i < array_count_; ++i) p.arrays[i] = arrays_[i].where;
  return p;
}

std::string RunDescription::text_of(const Value& value) const {
  switch (value.kind) {
    case Kind::number:
      return fmt::to_string(value.value);
    case Kind::yes_no:
      return value.value ? "true" : "false";
    case Kind::given:
      return value.value ? "given" : "not given";
    case Kind::layout:
      return longspan::name(static_cast<Layout>(value.value));
    default:
      return longspan::name(static_cast<DType>(value.value));
  }
}

std::string RunDescription::text_of(const Array& array, const std::uint64_t* word) const {
  std::vector<std::string> shown;
  for (int i = 0; i < array.shown; ++i) {
    const std::uint64_t bits = array.first[i];
    if (array.type == 'f')
      shown.push_back(fmt::to_string(load_element(&bits, array.dtype, 0)));
    else if (array.where.unit == 4)
      shown.push_back(fmt::to_string(static_cast<std::int32_t>(bits)));
    else
      shown.push_back(fmt::to_string(static_cast<std::int64_t>(bits)));
  }
  if (array.shown == array.where.size()) return fmt::format("[{}]", fmt::join(shown, ", "));
  std::string text = fmt::format("{} values", array.where.size());
  if (!shown.empty()) text = fmt::format("[{}, ...], {}", fmt::join(shown, ", "), text);
  return word == nullptr ? text : text + fmt::format(" with digest {:016x}", *word);
}

NamedValues RunDescription::text(const std::uint64_t* words) const {
  NamedValues named;
  for (int i = 0; i < count_; ++i) {
    std::string name = values_[i].name;
    if (values_[i].kind == Kind::dtype) name += " (type)";
    named.emplace_back(std::move(name), text_of(values_[i]));
  }
  for (int i = 0; i < array_count_; ++i)
    named.emplace_back(arrays_[i].name, text_of(arrays_[i], words ? words + i : nullptr));
  return named;
}

std::uint32_t RunHistory::add(const RunDescription& description) {
  if (++last_ == 0) ++last_;
  runs_[last_ % kRuns] = description;
  return last_;
}

std::uint64_t* RunHistory::words(std::uint32_t run) const {
  return words_ ? words_.get() + run % kRuns * (kernels::DigestParams::kMostArrays + 1) : nullptr;
}

NamedValues RunHistory::describe(std::uint32_t run) const {
  if (run == 0 || run > last_ || last_ - run >= kRuns) return {};
  return runs_[run % kRuns].text(words(run));
}

}  // namespace longspan
