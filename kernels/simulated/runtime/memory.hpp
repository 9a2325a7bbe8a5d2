// The memory of the GPUs and pinned memory of the host. Each allocation is a separate mapping
// between guard pages, and its end is as near to them as CUDA's alignment of 256 bytes allows. All
// functions are called with the machine's mutex held.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <string>

namespace longspan::simulated {

/// The byte value of memory that has not been written: a NaN of every type, and -1.
inline constexpr unsigned char kFresh = 0xff;

struct Allocation {
  enum class Kind { device, host, imported };  // imported: of another process

  std::byte* reserved = nullptr;  // all of it, including the guard pages
  std::size_t reserved_bytes = 0;
  std::byte* pages = nullptr;  // the mapping between them
  std::size_t page_bytes = 0;
  std::byte* data = nullptr;  // the address that the caller gets
  std::size_t bytes = 0;
  Kind kind = Kind::device;
  int device = 0;  // by its index on the node
  int file = -1;   // of the pages, if another process may map them
  int opened = 0;  // number of times that its handle was opened in this process
  int owner = 0;   // of an imported one: its process, and the file there
  int owner_file = -1;
};

/// Allocates from one GPU, or from the host. Null if there is not enough memory.
Allocation* allocate(std::size_t bytes, Allocation::Kind kind);

/// Maps a file, in the way an allocation of another process is mapped. Null if that is impossible.
Allocation* import_pages(int file, const Allocation& as);

/// Moves its pages into a file that other processes can map, at the same addresses. After them the
/// file has `more` bytes of 0. False: no such file can be made.
bool put_into_file(Allocation& allocation, std::size_t more);

/// Makes it inaccessible. The memory around it must be unchanged, or the process ends.
void release(Allocation* allocation);

/// The allocation whose data begins here; null: none.
Allocation* find_allocation(const void* data);

void for_each_allocation(const std::function<void(Allocation&)>& use);

/// The location of memory that was given to a call.
enum class Where { elsewhere, inside, outside };  // outside: partly so, or freed
struct Found {
  Where where = Where::elsewhere;  // elsewhere: the host's own
  const Allocation* allocation = nullptr;
};
Found look_up(const void* data, std::size_t bytes);

/// For people: the allocation that contains an address, or is next to it.
std::string describe_address(const void* address);

std::size_t free_memory(int device);

}  // namespace longspan::simulated
