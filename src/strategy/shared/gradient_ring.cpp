#include "src/strategy/shared/returning_sums.hpp"

#include <fmt/format.h>

namespace longspan {

ReturningSums::ReturningSums(comm::Transport& comm) : comm_(comm), steps_(1) {
  for (int s = 1; s < comm.size(); ++s)
    steps_.push_back(fmt::format("backward, ring of gradients, step {} of {}", s, comm.size() - 1));
}

void ReturningSums::lay_out(Parts& memory, std::int64_t bytes) {
  for (auto* slots : {&leaving_, &arriving_})
    for (std::byte*& sums : *slots) sums = memory.take(static_cast<std::size_t>(bytes));
}

}  // namespace longspan
