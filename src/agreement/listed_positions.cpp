#include "src/agreement/listed_positions.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/digest.hpp"
#include "kernels/read_back.hpp"
#include "longspan/error.hpp"
#include "src/base/divided_up.hpp"

namespace longspan {
namespace {

/// The word of a position: output `position` of splitmix64, whose finalizer is a bijection.
std::uint64_t word_of(std::int64_t position) {
  return kernels::mix(0x9e3779b97f4a7c15u * (static_cast<std::uint64_t>(position) + 1));
}

}  // namespace

void ListedPositions::Sums::add(std::int64_t position) {
  ++count;
  sum += word_of(position);
}

const ListedPositions::Sums& ListedPositions::Whole::of(std::int64_t length) {
  if (length < sums_.count - length) sums_ = {};  // it is shorter to start over than to go back
  while (sums_.count < length) sums_.add(sums_.count);
  while (sums_.count > length) sums_.sum -= word_of(--sums_.count);
  return sums_;
}

ListedPositions::Sums ListedPositions::sums_of(std::span<const std::int64_t> table) {
  Sums sums;
  for (const std::int64_t position : table) sums.add(position);
  return sums;
}

ListedPositions::ListedPositions(comm::Transport& comm, const Options& options)
    : comm_(comm),
      keys_(options.keys.layout == Layout::listed),
      rows_(options.queries && options.queries->layout == Layout::listed) {
  if (!(keys_ || rows_)) return;
  if (comm.device() != Device::host && !options.debug.check_arrays) return;
  reports_.resize(static_cast<std::size_t>(comm.size()));
  keys_of_rank_.resize(reports_.size());
}

bool ListedPositions::read(const Run& run, Tables& tables) {
  const Device device = comm_.device();
  const bool copies = device != Device::host;
  if (is_captured(device, run.stream)) return false;
  if (copies) comm_.wait(run.stream, "reading of listed positions");
  const auto table_of = [&](const Shard& shard, std::vector<std::int64_t>& copy) {
    const std::span table(shard.table, static_cast<std::size_t>(shard.listed));
    if (!copies) return table;
    copy.resize(table.size());
    read_back(device, table.data(), table.size_bytes(), copy.data());
    return std::span<const std::int64_t>(copy);
  };
  if (keys_) tables.keys = table_of(run.arrays.keys, key_table_);
  if (rows_) tables.rows = table_of(run.arrays.queries, row_table_);
  if (copies && run.arrays.kv_len != nullptr) {
    std::int32_t length = 0;
    read_back(device, run.arrays.kv_len, sizeof length, &length);
    tables.length = length;
  } else {
    tables.length = run.attend.batch.keys(0, run.arrays.keys);
  }
  return true;
}

template <class T>
void ListedPositions::gather(const T* send, std::size_t count, T* recv, Stream stream,
                             const char* step, std::uint64_t* digests) const {
  const std::size_t bytes = count * sizeof(T);
  if (comm_.size() == 1) {
    std::copy_n(send, send == recv ? 0 : count, recv);
  } else if (comm_.device() == Device::host) {
    comm_.all_gather(send, recv, bytes, stream, step, digests);
  } else {
    const std::vector<std::string> all =
        comm_.gather(std::string(reinterpret_cast<const char*>(send), bytes), step);
    for (std::size_t p = 0; p < all.size(); ++p)
      std::memcpy(recv + p * count, all[p].data(), std::min(bytes, all[p].size()));
  }
}

bool ListedPositions::agree_on_length(std::int64_t most) const {
  return std::all_of(reports_.begin(), reports_.end(), [&](const Report& report) {
    return report.length == reports_[0].length && report.length >= 0 &&
           (most == 0 || report.length <= most);
  });
}

void ListedPositions::check(Pass& pass) {
  const Run& run = pass.run;
  Tables tables;
  if (!read(run, tables)) return;
  Report& own = reports_[static_cast<std::size_t>(comm_.rank())];
  own = {};
  if (keys_) own.keys = sums_of(tables.keys);
  if (rows_) own.rows = sums_of(tables.rows);
  own.length = tables.length;
  gather(&own, 1, reports_.data(), run.stream, "sums of listed positions", pass.digests);
  const bool on_host = comm_.device() == Device::host;
  if (on_host) pass.digests = nullptr;
  // The checks of arrays and of the run report what is wrong with lengths.
  if (!on_host && !agree_on_length(run.attend.max_kv_len)) return;
  Report all;
  for (std::size_t p = 0; p < reports_.size(); ++p) {
    all.keys.add(reports_[p].keys);
    all.rows.add(reports_[p].rows);
    keys_of_rank_[p] = reports_[p].keys.count;
  }
  const std::int64_t length = tables.length, tokens = run.args.total_tokens;
  if (keys_ && all.keys != whole_keys_.of(length))
    find("key_table", tables.keys, length, all.keys.count, run.stream);
  if (rows_ && all.rows != whole_rows_.of(tokens))
    find("query_table", tables.rows, tokens, all.rows.count, run.stream);
}

void ListedPositions::find(const char* name, std::span<const std::int64_t> table,
                           std::int64_t length, std::int64_t listed, Stream stream) const {
  constexpr std::int64_t kParts = 64;
  std::vector<Sums> parts(reports_.size() * kParts);  // [ranks, kParts]
  const auto own =
      std::span(parts).subspan(static_cast<std::size_t>(comm_.rank()) * kParts, kParts);
  std::int64_t begin = 0, end = length, step = 0;
  const auto is_right = [&](std::size_t part) {
    Sums found, wanted;
    for (std::size_t p = 0; p < reports_.size(); ++p) found.add(parts[p * kParts + part]);
    for (std::int64_t position = begin; position < begin + step; ++position) wanted.add(position);
    return found == wanted;
  };
  std::size_t part = 0;
  // Missing and duplicate positions of the parts add up to those of the whole, so at least one part
  // is wrong.
  while (step != 1) {
    step = std::max<std::int64_t>(1, divided_up(end - begin, kParts));
    std::fill(own.begin(), own.end(), Sums{});
    for (const std::int64_t position : table)
      if (position >= begin && position < end)
        own[static_cast<std::size_t>((position - begin) / step)].add(position);
    gather(own.data(), kParts, parts.data(), stream, "search among listed positions");
    for (part = 0; begin + step < end && is_right(part); ++part) begin += step;
    end = std::min(begin + step, end);
  }
  std::vector<std::string> who;
  for (std::size_t p = 0; p < reports_.size(); ++p)
    if (const std::int64_t times = parts[p * kParts + part].count; times > 0)
      who.push_back(fmt::format("rank {}{}", comm_.name_of(static_cast<int>(p)),
                                times > 1 ? fmt::format(" {} times", times) : ""));
  if (who.empty()) who.emplace_back("no rank");
  throw InputError(fmt::format(
      "{}: position {} is listed by {}. Each of the {} positions must be listed once, by "
      "one rank; the ranks list {} in all",
      name, begin, fmt::join(who, " and "), length, listed));
}

}  // namespace longspan
