#include "launcher/io/output_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cstring>
#include <filesystem>
#include <functional>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "longspan/error.hpp"

namespace longspan::launcher {
namespace {

namespace fs = std::filesystem;

/// The name of an unfinished file, for a signal handler, which may neither allocate nor lock.
struct Unfinished {
  std::atomic<bool> used{false}, ready{false};
  std::array<char, PATH_MAX> path{};
};
std::array<Unfinished, 4> unfinished;

void remember(const std::string& path) {
  if (path.size() >= PATH_MAX) return;  // open() refuses it
  for (Unfinished& slot : unfinished) {
    if (slot.used.exchange(true)) continue;
    std::memcpy(slot.path.data(), path.c_str(), path.size() + 1);
    slot.ready = true;
    return;
  }
}

void forget(const std::string& path) {
  for (Unfinished& slot : unfinished) {
    if (!slot.ready || path != slot.path.data()) continue;
    slot.ready = false;
    slot.used = false;
  }
}

/// The end of the links of `path`: a file, or a name that does not exist yet. Empty where links do
/// not end.
fs::path without_links(fs::path path) {
  constexpr int kMostLinks = 40;
  std::error_code error;
  const fs::path own = fs::canonical("/proc/self/fd", error);
  for (int links = 0; links < kMostLinks; ++links) {
    const fs::path folder = fs::canonical(path.has_parent_path() ? path.parent_path() : ".", error);
    if (error) return {};
    path = folder / path.filename();
    if (folder == own || !fs::is_symlink(fs::symlink_status(path, error))) return path;
    const fs::path link = fs::read_symlink(path, error);
    if (error) return {};
    path = link.is_absolute() ? link : folder / link;
  }
  errno = ELOOP;
  return {};
}

/// The path behind a name.
std::string place_of(const std::string& name) {
  return name == kStandardOutput ? "/proc/self/fd/1" : name;
}

/// The descriptor of this process that a path such as /proc/self/fd/1 names.
std::optional<int> own_descriptor(const fs::path& path) {
  std::error_code error;
  if (path.parent_path() != fs::canonical("/proc/self/fd", error)) return std::nullopt;
  const std::string text = path.filename();
  int number = -1;
  const char* const end = text.data() + text.size();
  const auto [stop, status] = std::from_chars(text.data(), end, number);
  if (status != std::errc() || stop != end) return std::nullopt;
  return number;
}

}  // namespace

void remove_unfinished() noexcept {
  for (const Unfinished& slot : unfinished)
    if (slot.ready) ::unlink(slot.path.data());
}

std::string identity(const std::string& name) {
  const std::string path = place_of(name);
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0) {
    if (S_ISCHR(status.st_mode)) return {};
    return fmt::format("{}:{}", status.st_dev, status.st_ino);
  }
  const fs::path target = without_links(path);
  if (target.empty() || ::stat(target.parent_path().c_str(), &status) != 0) return {};
  return fmt::format("{}:{}/{}", status.st_dev, status.st_ino, target.filename().string());
}

void refuse_equal_files(std::span<const NamedFile> files) {
  struct Seen {
    const NamedFile* named;
    std::string file;
  };
  std::vector<Seen> seen;
  for (const NamedFile& one : files) {
    std::string file = one.path.empty() ? "" : identity(one.path);
    if (file.empty() && one.path == kStandardOutput) file = one.path;  // a terminal
    if (file.empty()) continue;
    for (const auto& [other, its_file] : seen)
      if (one.is_output && its_file == file)
        throw UsageError(fmt::format("{} {} and {} {} are the same file; name another",
                                     other->option, other->path, one.option, one.path));
    seen.push_back({&one, file});
  }
}

OutputFile::OutputFile(std::string path, bool unnamed) : path_(std::move(path)), unnamed_(unnamed) {
  errno = 0;
  const fs::path target = without_links(place_of(path_));
  if (target.empty()) fail(std::strerror(errno != 0 ? errno : ENOENT));
  target_ = target;
  stream_ = own_descriptor(target).value_or(-1);
  look_at_target();
  if (direct_) {
    open_stream();
    return;
  }
  open();  // made and removed at once, so that a rank that is killed later leaves nothing behind
  close();
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      target_(std::move(other.target_)),
      temporary_(std::exchange(other.temporary_, {})),
      stream_(other.stream_),
      direct_(other.direct_),
      unnamed_(other.unnamed_),
      exists_(other.exists_),
      mode_(other.mode_),
      owner_(other.owner_),
      group_(other.group_),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

OutputFile::~OutputFile() { close(); }

void OutputFile::fail(const std::string& why) const {
  throw InputError(fmt::format("{} cannot be written: {}",
                               path_ == kStandardOutput ? "standard output" : path_ + ":", why));
}
void OutputFile::fail_with_errno() const { fail(std::strerror(errno)); }

void OutputFile::look_at_target() {
  struct stat status {};
  direct_ = stream_ >= 0;
  if (direct_ || ::stat(target_.c_str(), &status) != 0) return;
  exists_ = true;
  mode_ = status.st_mode & 07777;
  owner_ = status.st_uid;
  group_ = status.st_gid;
  direct_ = S_ISCHR(status.st_mode) || S_ISFIFO(status.st_mode);
  if (direct_) return;
  if (!S_ISREG(status.st_mode))
    fail(S_ISDIR(status.st_mode) ? "it is a folder; name a file in it"
                                 : "it is neither a file nor a pipe nor a character device");
  if (::access(target_.c_str(), W_OK) != 0) fail_with_errno();
}

/// Opens a stream. A pipe can be opened once it has a reader, which may come a little later.
void OutputFile::open_stream() {
  using std::chrono::milliseconds;
  if (stream_ >= 0) {
    descriptor_ = ::fcntl(stream_, F_DUPFD_CLOEXEC, 3);
  } else {
    constexpr int kFlags = O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY;
    descriptor_ = ::open(target_.c_str(), kFlags);
    for (int tries = 0; descriptor_ < 0 && errno == ENXIO && tries < 40; ++tries) {
      std::this_thread::sleep_for(milliseconds(50));
      descriptor_ = ::open(target_.c_str(), kFlags);
    }
    if (descriptor_ < 0 && errno == ENXIO) fail("it is a pipe, and nobody reads it");
  }
  const int flags = descriptor_ < 0 ? -1 : ::fcntl(descriptor_, F_GETFL);
  if (flags < 0) fail_with_errno();
  if ((flags & O_ACCMODE) == O_RDONLY) fail("it is closed, or open for reading alone");
  if (stream_ < 0) ::fcntl(descriptor_, F_SETFL, flags & ~O_NONBLOCK);
}

void OutputFile::open() {
  const fs::path folder = fs::path(target_).parent_path();
  descriptor_ = -1;
  if (unnamed_) {
    descriptor_ = ::open(folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
    unnamed_ = descriptor_ >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL);
  }
  if (!unnamed_) {
    temporary_ = folder / fmt::format(".longspan-{}-{:x}.part", ::getpid(),
                                      std::hash<std::string>()(target_));
    remember(temporary_);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ < 0) forget(std::exchange(temporary_, {}));
  }
  if (descriptor_ < 0) fail_with_errno();
}

/// Drops what was not committed.
void OutputFile::close() {
  const int error = errno;
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
  if (!temporary_.empty()) {
    ::unlink(temporary_.c_str());
    forget(std::exchange(temporary_, {}));
  }
  errno = error;
}

void OutputFile::write(const void* data, std::size_t bytes) {
  if (descriptor_ < 0) open();
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, at, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_with_errno();
    at += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void OutputFile::commit() {
  if (direct_) {
    if (::close(std::exchange(descriptor_, -1)) != 0) fail_with_errno();
    return;
  }
  if (descriptor_ < 0) open();  // nothing was written, so the file is empty
  bool done = true;
  if (exists_) {
    // The owner comes first, since a change of it may clear bits of the mode. Only root can give a
    // file to another user; for others the mode is what counts.
    if (::fchown(descriptor_, owner_, group_) != 0) errno = 0;
    done = ::fchmod(descriptor_, mode_) == 0;
  }
  if (unnamed_ && done) {
    const fs::path folder = fs::path(target_).parent_path();
    const std::string name = folder / fmt::format(".longspan-{}-{:x}.part", ::getpid(),
                                                  std::hash<std::string>()(target_));
    temporary_ = name;
    remember(name);
    done = ::linkat(AT_FDCWD, fmt::format("/proc/self/fd/{}", descriptor_).c_str(), AT_FDCWD,
                    name.c_str(), AT_SYMLINK_FOLLOW) == 0;
  }
  done = done && ::close(std::exchange(descriptor_, -1)) == 0 &&
         ::rename(temporary_.c_str(), target_.c_str()) == 0;
  if (!done) {
    close();
    fail_with_errno();
  }
  forget(std::exchange(temporary_, {}));
}

}  // namespace longspan::launcher
