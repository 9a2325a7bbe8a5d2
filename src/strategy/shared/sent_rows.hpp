// The rows, or keys, that ranks send while those who receive them already attend with others: in
// how many pieces they go, and what a kernel that waits for them is told.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/transport.hpp"
#include "kernels/key_arrivals.hpp"
#include "kernels/row_puts.hpp"
#include "src/parts.hpp"
#include "src/strategy/shared/stretches.hpp"

namespace longspan {

/// In how many pieces the `bytes` travel that a rank puts while others attend: the first must come
/// early, and behind each all warps that put meet.
int pieces_of_bytes(double bytes);

/// The first and the last `most` rows of each stretch, of shorter ones all.
std::vector<Stretch> ends_of(const std::vector<Stretch>& stretches, std::int64_t most);

/// The words that an exchange by put_rows takes, in receive memory, which is zeroed when it is
/// made.
struct PutWords {
  std::uint64_t* said = nullptr;  // [ranks] what each rank says of the run
  unsigned* done = nullptr;       // kernels::RowPuts::done

  void lay_out(Parts& memory, int ranks);
  /// Begins an exchange (Transport::begin_puts), and completes `puts` with what all of them have.
  void begin(comm::Transport& comm, const std::shared_ptr<std::byte>& buffer,
             kernels::RowPuts& puts, const char* step) const;
};

/// Lists what all ranks have in `table`, for a kernel of the rank `own`. Returns the number of
/// portions.
int list_portions(const StretchesOfRanks& ranks, int own, kernels::KeyArrivals::Portion* table);

}  // namespace longspan
