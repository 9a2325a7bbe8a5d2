// The memory of the GPUs and pinned memory of the host: each allocation is a mapping of its own,
// between pages that nobody may touch, and its end lies as near to them as CUDA's alignment of 256
// bytes lets it. All of it is called with the machine's mutex held.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <string>

namespace longspan::simulated {

/// What stands in memory that nobody has written: a NaN of every type, and -1.
inline constexpr unsigned char kFresh = 0xff;

struct Allocation {
  enum class Kind { device, host, imported };  // imported: of another process

  std::byte* reserved = nullptr;  // all of it, with the pages that nobody may touch
  std::size_t reserved_bytes = 0;
  std::byte* pages = nullptr;  // what is mapped between them
  std::size_t page_bytes = 0;
  std::byte* data = nullptr;  // what the caller knows
  std::size_t bytes = 0;
  Kind kind = Kind::device;
  int device = 0;  // by its place on the node
  int file = -1;   // behind the pages, where another process may map them
  int opened = 0;  // times that its handle was opened in this process
  int owner = 0;   // of an imported one: its process, and the file there
  int owner_file = -1;
};

/// Null, where there is not so much memory. Of one GPU, or of the host.
Allocation* allocate(std::size_t bytes, Allocation::Kind kind);

/// Maps what a file holds, as an allocation of another process is mapped. Null: it cannot be.
Allocation* import_pages(int file, const Allocation& as);

/// Its pages become those of a file that other processes can map, at the same addresses. Behind
/// them the file has `more` bytes of 0. False: there is no such file to be had.
bool put_into_file(Allocation& allocation, std::size_t more);

/// Nobody may touch it any more. What lies around it has to be as it was, or the process ends.
void release(Allocation* allocation);

/// The one whose data begins here; null: none does.
Allocation* find_allocation(const void* data);

void for_each_allocation(const std::function<void(Allocation&)>& use);

/// Where memory lies that a call was given.
enum class Where { elsewhere, inside, outside };  // outside: partly so, or freed
struct Found {
  Where where = Where::elsewhere;  // elsewhere: the host's own
  const Allocation* allocation = nullptr;
};
Found look_up(const void* data, std::size_t bytes);

/// For people: which allocation an address is of, or is next to.
std::string describe_address(const void* address);

std::size_t free_memory(int device);

}  // namespace longspan::simulated
