// Writes a file that appears whole or not at all: it has no name while it is written (or, on file
// systems that need one, another name beside the target), and gets its name at the end. Links are
// followed, and an existing file keeps its mode and its owner. Devices, pipes and /dev/stdout, also
// named -, are written directly, from the first byte on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace longspan::launcher {

/// The name of standard output; ./- is a file of this name.
constexpr const char* kStandardOutput = "-";

/// Identifies the file behind a path, with links followed: equal texts mean one file. Empty where
/// there is none, or a character device, which several may write to.
std::string identity(const std::string& name);

/// A file that an option names.
struct NamedFile {
  const char* option;
  std::string path;  // empty: not given
  bool is_output = true;
};

/// Refuses names of one file, of which one is an output. Two outputs in one file would leave only
/// one, and an output over an input would destroy its source. Inputs come first. Throws
/// UsageError.
void refuse_equal_files(std::span<const NamedFile> files);

class OutputFile {
 public:
  /// Throws InputError when `path` cannot be written; creates nothing that lasts. With `unnamed`
  /// the file has no name while it is written, where the file system supports that.
  explicit OutputFile(std::string path, bool unnamed = true);
  ~OutputFile();
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;

  const std::string& path() const { return path_; }
  bool is_standard_output() const { return stream_ == 1; }

  void write(const void* data, std::size_t bytes);
  /// Gives the file its name.
  void commit();

 private:
  void look_at_target();
  void open_stream();
  void open();
  void close();
  [[noreturn]] void fail(const std::string& why) const;
  [[noreturn]] void fail_with_errno() const;

  std::string path_;    // as given
  std::string target_;  // where its links end
  std::string temporary_;
  int stream_ = -1;      // one of this process's descriptors, by /dev/stdout or /dev/fd
  bool direct_ = false;  // a device, a pipe or a stream
  bool unnamed_ = true;
  bool exists_ = false;
  unsigned mode_ = 0, owner_ = 0, group_ = 0;  // of the file that is there already
  int descriptor_ = -1;
};

/// Removes unfinished files with temporary names. It does only what a signal handler may do.
void remove_unfinished() noexcept;

}  // namespace longspan::launcher
