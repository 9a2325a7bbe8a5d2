#include "src/strategy/shared/rank_sums.hpp"

#include "src/base/at.hpp"
#include "src/base/divided_up.hpp"

namespace longspan {
namespace {

constexpr std::int64_t kWord = 64;  // bytes; shares are whole words, as kernels add up 16 floats

std::int64_t share_of(std::int64_t bytes, std::int64_t ranks) {
  return divided_up(bytes, ranks * kWord) * kWord;
}

}  // namespace

std::int64_t rank_sum_room(std::int64_t bytes, int ranks) { return share_of(bytes, ranks) * ranks; }

void add_up_ranks(std::byte* part, std::byte* arriving, std::int64_t bytes, const RankFold& fold,
                  const kernels::GradientKernels& kernels, comm::Transport& comm, Stream stream,
                  const SumSteps& steps, std::uint64_t* digests) {
  const std::int64_t share = share_of(bytes, comm.size());
  comm.all_to_all(part, arriving, at(share), stream, steps.exchange, digests);
  const std::byte* const sum =
      fold([&](int rank) { return arriving + rank * share; }, kernels, share, stream);
  comm.all_gather(sum, part, at(share), stream, steps.gather);
}

}  // namespace longspan
