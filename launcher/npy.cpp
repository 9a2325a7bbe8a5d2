#include "launcher/npy.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

#include "longspan/error.hpp"

namespace longspan::launcher {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";

template <class... Args>
[[noreturn]] void refuse(const std::string& path, fmt::format_string<Args...> format,
                         Args&&... args) {
  throw InputError(fmt::format("{}: {}", path, fmt::format(format, std::forward<Args>(args)...)));
}

/// The text after `'key':` in a header such as {'descr': '<f4', 'fortran_order': False, ...}.
std::string_view value_of(std::string_view header, std::string_view key, const std::string& path) {
  const std::size_t at = header.find(fmt::format("'{}'", key));
  const std::size_t colon = at == header.npos ? at : header.find(':', at);
  if (colon == header.npos) refuse(path, "its .npy header has no '{}'", key);
  header.remove_prefix(colon + 1);
  header.remove_prefix(std::min(header.find_first_not_of(' '), header.size()));
  return header;
}

std::vector<std::int64_t> read_shape(std::string_view text, const std::string& path) {
  const std::size_t end = text.find(')');
  if (text.empty() || text.front() != '(' || end == text.npos)
    refuse(path, "its .npy header has no readable shape");
  std::vector<std::int64_t> shape;
  const char* last = text.data() + end;
  for (const char* at = text.data() + 1; at < last;) {
    if (*at == ' ' || *at == ',') {
      ++at;
      continue;
    }
    std::int64_t extent = 0;
    const auto [next, status] = std::from_chars(at, last, extent);
    if (status != std::errc{} || extent < 0) refuse(path, "its .npy header has no readable shape");
    shape.push_back(extent);
    at = next;
  }
  return shape;
}

DType read_dtype(std::string_view text, const std::string& asked, const std::string& path) {
  if (text.substr(0, 1) != "'") refuse(path, "holds records, not one type of number");
  text.remove_prefix(1);
  const std::string_view code = text.substr(0, text.find('\''));
  DType found;
  if (code == "<f4") {
    found = DType::fp32;
  } else if (code == "<f2") {
    found = DType::fp16;
  } else if (code == "<V2" || code == "|V2") {
    if (asked.empty())
      refuse(path,
             "holds two-byte values of unknown meaning ('{}'); if they are bfloat16, add "
             "--dtype bf16",
             code);
    found = DType::bf16;
  } else {
    refuse(path,
           "holds '{}'; longspan reads '<f4' (fp32), '<f2' (fp16) and, with --dtype bf16, "
           "'<V2'",
           code);
  }
  if (!asked.empty() && asked != name(found))
    refuse(path, "holds {} ('{}'), but {} was asked for", name(found), code, asked);
  return found;
}

std::shared_ptr<const std::byte> map_file(const std::string& path, std::size_t& bytes) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) refuse(path, "cannot be opened: {}", std::strerror(errno));
  struct stat status {};
  const bool regular = ::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
  bytes = regular ? static_cast<std::size_t>(status.st_size) : 0;
  void* memory = MAP_FAILED;
  if (bytes > 0) memory = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
  const int error = errno;
  ::close(descriptor);
  if (!regular) refuse(path, "is not a regular file");
  if (bytes == 0) refuse(path, "is empty; a .npy file was expected");
  if (memory == MAP_FAILED) refuse(path, "cannot be mapped: {}", std::strerror(error));
  return {static_cast<const std::byte*>(memory),
          [bytes](const std::byte* data) { ::munmap(const_cast<std::byte*>(data), bytes); }};
}

}  // namespace

NpyFile::NpyFile(const std::string& path, const std::string& dtype) : path_(path) {
  std::size_t bytes = 0;
  map_ = map_file(path, bytes);
  const std::string_view file(reinterpret_cast<const char*>(map_.get()), bytes);
  if (!file.starts_with(kMagic)) refuse(path, "is not a .npy file");
  const int version = file.size() > 6 ? file[6] : 0;
  if (version < 1 || version > 3) refuse(path, "is .npy format {}; 1 to 3 are read", version);

  // magic, two bytes of version, the header's length in 2 bytes (format 1) or 4, the header
  const std::size_t start = version == 1 ? 10 : 12;
  if (bytes < start) refuse(path, "is truncated: it ends inside its header");
  std::size_t length = 0;
  for (std::size_t i = start; i-- > 8;) length = length << 8 | static_cast<unsigned char>(file[i]);
  if (bytes - start < length) refuse(path, "is truncated: it ends inside its header");
  const std::string_view header = file.substr(start, length);

  dtype_ = read_dtype(value_of(header, "descr", path), dtype, path);
  if (!value_of(header, "fortran_order", path).starts_with("False"))
    refuse(path, "is in Fortran order; save it with numpy.ascontiguousarray");
  shape_ = read_shape(value_of(header, "shape", path), path);

  std::int64_t promised = static_cast<std::int64_t>(size_of(dtype_));
  for (const std::int64_t extent : shape_)
    if (__builtin_mul_overflow(promised, extent, &promised))
      refuse(path, "has the impossible shape {}", shape_text());
  const std::size_t found = bytes - start - length;
  if (found < static_cast<std::size_t>(promised))
    refuse(path, "is truncated: {} of {} take {} bytes, the file holds {}", shape_text(),
           name(dtype_), promised, found);
  data_ = map_.get() + start + length;
}

std::string NpyFile::shape_text() const { return fmt::format("[{}]", fmt::join(shape_, ", ")); }

std::string npy_header(DType dtype, std::span<const std::int64_t> shape) {
  const char* code = dtype == DType::fp32 ? "<f4" : dtype == DType::fp16 ? "<f2" : "<V2";
  std::string text = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}",
                                 code, fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
  const std::size_t preamble = kMagic.size() + 4;
  const std::size_t total = (preamble + text.size() + 1 + 63) / 64 * 64;
  text.resize(total - preamble - 1, ' ');
  text += '\n';
  std::string header(kMagic);
  header += {'\1', '\0', static_cast<char>(text.size() & 255), static_cast<char>(text.size() >> 8)};
  return header + text;
}

OutputFile::OutputFile(std::string path) : path_(std::move(path)) {
  struct stat status {};
  if (::stat(path_.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
    throw InputError(fmt::format("{}: exists and is not a regular file; name another", path_));
  open();  // Made and removed at once: a rank that is killed later leaves nothing behind.
  ::close(std::exchange(descriptor_, -1));
  ::unlink(temporary_.c_str());
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::move(other.temporary_)),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

OutputFile::~OutputFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void OutputFile::fail(const std::string& doing) const {
  throw InputError(fmt::format("{}: cannot be {}: {}", path_, doing, std::strerror(errno)));
}

void OutputFile::open() {
  temporary_ = fmt::format("{}.{}.part", path_, ::getpid());
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor_ < 0) fail("written");
}

void OutputFile::write(const void* data, std::size_t bytes) {
  if (descriptor_ < 0) open();
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, at, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("written");
    at += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void OutputFile::commit() {
  if (::close(std::exchange(descriptor_, -1)) != 0 ||
      ::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    errno = error;
    fail("written");
  }
}

}  // namespace longspan::launcher
