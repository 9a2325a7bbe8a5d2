#include "src/reshard/check_reshard.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "kernels/digest.hpp"
#include "longspan/attention.hpp"
#include "longspan/error.hpp"
#include "longspan/storage.hpp"
#include "src/arguments/tensor_checks.hpp"
#include "src/arguments/validate.hpp"

namespace longspan {
namespace {

/// A list as text for comparison: its first values, and a digest of all.
std::string text_of(const std::vector<std::int64_t>& list) {
  constexpr std::size_t kShown = 6;
  if (list.size() <= kShown) return fmt::format("[{}]", fmt::join(list, ", "));
  std::uint64_t digest = 0;
  for (std::size_t i = 0; i < list.size(); ++i)
    digest +=
        kernels::mixed_element(static_cast<std::int64_t>(i), static_cast<std::uint64_t>(list[i]));
  return fmt::format("[{}, ...], {} values with digest {:016x}",
                     fmt::join(list.begin(), list.begin() + kShown, ", "), list.size(), digest);
}

void describe(const CacheRanks& cache, const std::string& side, NamedValues& values) {
  const Sharding& rule = cache.rule;
  values.emplace_back(side + ".rule", rule.layout == Layout::interleaved
                                          ? fmt::format("{}:{}", name(rule.layout), rule.block)
                                          : std::string(name(rule.layout)));
  values.emplace_back(side + ".first_rank", fmt::to_string(cache.first_rank));
  values.emplace_back(side + ".ranks", fmt::to_string(cache.ranks));
  values.emplace_back(side + ".table", text_of(cache.table));
}

/// Throws UsageError if the positions in a table do not ascend from 0 to the length.
void check_table(const CacheRanks& cache, const ReshardOptions& o, const char* side) {
  const bool has_ranges = cache.rule.layout == Layout::ranges;
  const std::size_t ends = static_cast<std::size_t>(cache.ranks) + 1;
  const std::size_t wanted = has_ranges ? o.lengths.size() * ends : 0;
  usage(cache.table.size() == wanted,
        fmt::format("{}.table has {} entries; {} for the layout {}", side, cache.table.size(),
                    has_ranges ? fmt::format("{} sequences of {} ranks have {}", o.lengths.size(),
                                             cache.ranks, wanted)
                               : std::string("there are none"),
                    name(cache.rule.layout)));
  for (std::size_t b = 0; has_ranges && b < o.lengths.size(); ++b) {
    const auto row = cache.table.begin() + static_cast<std::ptrdiff_t>(b * ends);
    const auto end = row + static_cast<std::ptrdiff_t>(ends);
    usage(*row == 0 && *(end - 1) == o.lengths[b] && std::is_sorted(row, end),
          fmt::format("{}.table of sequence {} is [{}]; it ascends from 0 to its {} keys", side, b,
                      fmt::join(row, end, ", "), o.lengths[b]));
  }
}

void check_ranks(const CacheRanks& cache, const ReshardOptions& o, int ranks, const char* side) {
  const Sharding& rule = cache.rule;
  usage(rule.layout <= Layout::listed,
        fmt::format("{} has a layout of number {}, which does not exist", side,
                    static_cast<int>(rule.layout)));
  if (rule.layout == Layout::listed)
    throw Unsupported(fmt::format(
        "{} has listed keys, of which each rank knows its own alone; reshard takes every other "
        "layout (ranges too)",
        side));
  usage(rule.block >= 1 && rule.block <= kMostCount,
        fmt::format("{} has blocks of {}; a block has 1 to 2^31 - 1", side, rule.block));
  usage(cache.first_rank >= 0 && cache.ranks >= 1 &&
            std::int64_t{cache.first_rank} + cache.ranks <= ranks,
        fmt::format("{} is on {} ranks from rank {} on; there are {}: give 1 or more of them, or 0 "
                    "for all from first_rank on",
                    side, cache.ranks, cache.first_rank, ranks));
  check_table(cache, o, side);
}

/// The tensors of a cache without values, with the keys in place of the values.
CacheTensors with_values(const CacheTensors& cache, const ReshardOptions& o) {
  CacheTensors whole = cache;
  if (o.of_values() > 0) return whole;
  require(!cache.v, "v is given, and value_dim is 0: leave one of them out");
  whole.v = cache.k;
  return whole;
}

CacheView view(const CacheTensors& cache, const ReshardOptions& o, Device device) {
  const CacheShape shape =
      CacheShape{o.kv_heads, o.head_dim, o.of_values() > 0 ? o.of_values() : o.head_dim, o.dtype,
                 static_cast<int>(o.lengths.size())}
          .stored();
  check_latent_rows(cache.k, "k", o.dtype);
  CacheView view = cache.block_table
                       ? view_pages(cache.k, cache.v, cache.block_table, shape, device, "k", "v")
                       : view_contiguous(cache.k, cache.v, shape, device);
  view.carry_scales(o.dtype);
  return view;
}

void check_room(const CacheView& view, const std::vector<std::int64_t>& keys) {
  const std::int64_t all = std::accumulate(keys.begin(), keys.end(), std::int64_t{0});
  if (view.packed)
    require(view.keys >= all, "k has {} keys, sequence after sequence; this rank holds {}",
            view.keys, all);
  for (std::size_t b = 0; b < keys.size(); ++b)
    require(view.room() >= keys[b],
            "there is room for {} keys of a sequence; this rank holds {} of sequence {}",
            view.room(), keys[b], b);
}

/// Checks the pages of a table in host memory: each is a page of the cache, and, if they are
/// written, no other entry names it.
void check_pages(const kernels::Pages& pages, const std::vector<std::int64_t>& keys, bool written) {
  std::vector<bool> taken(written ? static_cast<std::size_t>(pages.count) : 0);
  for (std::size_t b = 0; b < keys.size(); ++b)
    for (std::int64_t i = 0; i < keys[b]; i += pages.size) {
      const std::int64_t page = pages.page(static_cast<int>(b), i), column = i / pages.size;
      require(page >= 0 && page < pages.count,
              "block_table[{}][{}] is {}, which is not one of the {} pages of the cache", b, column,
              page, pages.count);
      if (!written) continue;
      require(!taken[static_cast<std::size_t>(page)],
              "block_table[{}][{}] is {}, as another entry is; keys that are written have pages of "
              "their own",
              b, column, page);
      taken[static_cast<std::size_t>(page)] = true;
    }
}

kernels::KeyStore checked_store(const CacheTensors& given, const ReshardOptions& o,
                                const std::vector<std::int64_t>& keys, const std::int64_t* starts,
                                Device device, bool written) {
  const CacheTensors cache = with_values(given, o);
  const CacheView seen = view(cache, o, device);
  check_room(seen, keys);
  if (written) {
    require(o.of_values() == 0 || !values_in_keys(cache.k, cache.v),
            "v is the first columns of k; value_dim 0 moves such a cache");
    check_written_cache(cache.k, "k", cache.v, "v");
  }
  if (seen.pages && device == Device::host) check_pages(seen.pages, keys, written);
  kernels::KeyStore store{.k = seen.k, .v = seen.v, .pages = seen.pages};
  if (o.of_values() == 0) store.v.data = nullptr;
  if (seen.packed) store.start = starts;
  store.pitch = seen.pitch;
  return store;
}

}  // namespace

NamedValues describe(const ReshardOptions& o) {
  NamedValues values{{"kv_heads", fmt::to_string(o.kv_heads)},
                     {"head_dim", fmt::to_string(o.head_dim)},
                     {"value_dim", fmt::to_string(o.of_values())},
                     {"dtype", name(o.dtype)},
                     {"lengths", text_of(o.lengths)}};
  describe(o.from, "from", values);
  describe(o.to, "to", values);
  return values;
}

void check_options(const ReshardOptions& o, int ranks) {
  constexpr int kMostDim = 1 << 16;
  usage(o.kv_heads >= 1 && o.kv_heads <= kMostDim,
        fmt::format("kv_heads {} is not in 1 to {}", o.kv_heads, kMostDim));
  usage(o.head_dim >= 1 && o.head_dim <= kMostDim,
        fmt::format("head_dim {} is not in 1 to {}", o.head_dim, kMostDim));
  usage(o.of_values() >= 0 && o.of_values() <= kMostDim,
        fmt::format("value_dim {} is not in 0 to {}", o.of_values(), kMostDim));
  usage(is_float(o.dtype) || o.dtype == DType::fp64 || is_latent_row(o.dtype),
        fmt::format("dtype is {}; fp64, fp32, fp16, bf16 or fp8 is wanted, or rows of latent keys "
                    "that carry their scales",
                    name(o.dtype)));
  const RowFormat row = row_format_of(o.dtype);
  usage(row.bytes == 0 || (o.kv_heads == 1 && o.head_dim == row.dim && o.of_values() == 0),
        fmt::format("dtype {} with kv_heads {}, head_dim {} and value_dim {}: its rows are latent "
                    "keys, of 1 kv head and head_dim {}, which hold the values: value_dim is 0",
                    name(o.dtype), o.kv_heads, o.head_dim, o.of_values(), row.dim));
  usage(o.lengths.size() <= static_cast<std::size_t>(kMostCount),
        fmt::format("there are {} lengths; 0 to 2^31 - 1 are possible", o.lengths.size()));
  double keys = 0;
  for (std::size_t b = 0; b < o.lengths.size(); ++b) {
    usage(o.lengths[b] >= 0 && o.lengths[b] <= std::int64_t{1} << 41,
          fmt::format("lengths[{}] is {}; it is 0 to 2^41", b, o.lengths[b]));
    keys += static_cast<double>(o.lengths[b]);
  }
  const StorageFormat format = storage_of(o.dtype);
  const double bytes =
      keys * o.kv_heads *
      static_cast<double>(format.row_bytes(o.head_dim) + format.row_bytes(o.of_values()));
  usage(bytes < 0x1p48, fmt::format("lengths of {:.3g} keys in all, with kv_heads {}, head_dim {} "
                                    "and value_dim {}: such a cache takes {:.3g} bytes",
                                    keys, o.kv_heads, o.head_dim, o.of_values(), bytes));
  check_threads(o.threads);
  check_ranks(o.from, o, ranks, "from");
  check_ranks(o.to, o, ranks, "to");
}

kernels::KeyStore view_cache(const CacheTensors& cache, const ReshardOptions& o,
                             const std::vector<std::int64_t>& keys, const std::int64_t* starts,
                             Device device, bool written, const char* side) {
  if (std::all_of(keys.begin(), keys.end(), [](std::int64_t n) { return n == 0; })) return {};
  try {
    return checked_store(cache, o, keys, starts, device, written);
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", side, error.what()));
  }
}

}  // namespace longspan
