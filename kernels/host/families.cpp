#include "kernels/host/families.hpp"

#include <unistd.h>

#include <algorithm>

#include "kernels/host/bf16_tile.hpp"

namespace longspan::kernels::host {
namespace {

constexpr int kUsualLevels = 16;  // of a tile's stack, at its full number of rows
constexpr int kMostLevels = 64;   // at one row

/// Whether a tile of kTileRows fits the core's L2 cache.
bool has_large_cache() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const bool large = sysconf(_SC_LEVEL2_CACHE_SIZE) >= 1 << 20;
  return large;
#else
  return false;
#endif
}

/// The rows of a tile, in whole blocks, and a space for them, or for one block with a deep stack.
template <class Space>
OnHost::Room room_of(const AttendParams& p, std::int64_t limit, int block) {
  const auto most =
      static_cast<int>(std::min(limit, std::max<std::int64_t>(1, p.tokens) * p.heads));
  const int rows = (most + block - 1) / block * block;
  return {rows, std::max(Space::bytes(p, rows, kUsualLevels), Space::bytes(p, block, kMostLevels))};
}

constexpr HostFamily kTable[] = {
    {.id = OnHost::Id::amx,
     .words = {"AMX", "9 and more", "all",
               "bf16_products: products of bf16, where the CPU has AMX; no dropout"},
     .ends = Ends::in_states,
     .accepts =  // by the length of the sequence's own queries, on all ranks
     [](const AttendParams& p, const int& b) {
       return p.bf16_products && p.dtype == DType::bf16 && !p.dropout &&
              p.whole_query_len(b) >= kBf16Queries && has_bf16_products();
     },
     .scratch =
         [](const AttendParams& limits, const int&) {
           return limits.bf16_products ? room_of<Bf16Space>(limits, kBf16Rows, kBf16BlockRows)
                                       : OnHost::Room{};
         },
     .attend =
         [](const AttendParams& p, const TileWork& work) {
           const Bf16Space space(work.space, p, work.rows, work.levels);
           attend_bf16_tile(p, work.tile, work.packed, space);
           return TileStates{space.stats, space.o};
         }},
    {.id = OnHost::Id::vectors,
     .words = {"vectors", "any", "all", "elements of any type, in products of fp32"},
     .ends = Ends::in_states,
     .accepts = [](const AttendParams&, const int&) { return true; },
     .scratch =
         [](const AttendParams& limits, const int&) {
           return room_of<TileSpace>(limits, has_large_cache() ? kTileRows : kSmallTileRows, 1);
         },
     .attend =
         [](const AttendParams& p, const TileWork& work) {
           const TileSpace space(work.space, p, work.rows, work.levels);
           attend_tile(p, work.tile, work.packed, space);
           return TileStates{space.stats, space.o};
         }},
};

}  // namespace

std::span<const HostFamily, kFamilies> families() { return kTable; }

const HostFamily& serving(const AttendParams& p, int b) {
  return *first_that_accepts<OnHost>(families(), p, b);  // the last one accepts everything
}

}  // namespace longspan::kernels::host
