// A file appears whole or not at all, for anything at its name: nothing, a file, a link, a pipe;
// also on file systems that cannot write a file without a name.
#include "launcher/io/output_file.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "longspan/error.hpp"

namespace longspan::launcher {
namespace {

namespace fs = std::filesystem;

class OutputFileTest : public ::testing::TestWithParam<bool> {
 protected:
  OutputFileTest() {
    std::string name = (fs::temp_directory_path() / "longspan_output_XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~OutputFileTest() override { fs::remove_all(folder_); }

  fs::path at(const std::string& name) const { return folder_ / name; }
  OutputFile open(const fs::path& path) const { return OutputFile(path.string(), GetParam()); }

  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(folder_))
      found.push_back(entry.path().filename().string());
    std::sort(found.begin(), found.end());
    return found;
  }

  static std::string contents(const fs::path& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }
  static mode_t mode(const fs::path& path) {
    struct stat status {};
    EXPECT_EQ(::stat(path.c_str(), &status), 0);
    return status.st_mode & 07777;
  }

  fs::path folder_;
};

TEST_P(OutputFileTest, AppearsWithItsLastByte) {
  OutputFile file = open(at("a"));
  EXPECT_TRUE(names().empty());
  file.write("one", 3);
  EXPECT_FALSE(fs::exists(at("a")));
  file.write("two", 3);
  file.commit();
  EXPECT_EQ(contents(at("a")), "onetwo");
  EXPECT_EQ(names(), std::vector<std::string>{"a"});
}

TEST_P(OutputFileTest, LeavesNothingWhenItIsGivenUp) {
  {
    OutputFile file = open(at("a"));
    file.write("one", 3);
  }
  EXPECT_TRUE(names().empty());
}

TEST_P(OutputFileTest, LeavesNothingWhenASignalEndsTheProcess) {
  OutputFile file = open(at("a"));
  file.write("one", 3);
  remove_unfinished();  // what the handler does
  EXPECT_TRUE(names().empty());
}

TEST_P(OutputFileTest, KeepsTheModeOfTheFileThatWasThere) {
  for (const mode_t wanted : {0600, 0644, 0777}) {
    std::ofstream(at("a")) << "old";
    ASSERT_EQ(::chmod(at("a").c_str(), wanted), 0);
    OutputFile file = open(at("a"));
    EXPECT_EQ(contents(at("a")), "old");
    file.write("new", 3);
    file.commit();
    EXPECT_EQ(contents(at("a")), "new");
    EXPECT_EQ(mode(at("a")), wanted);
  }
}

TEST_P(OutputFileTest, FollowsLinks) {
  fs::create_directory(at("deep"));
  std::ofstream(at("deep/file")) << "old";
  fs::create_symlink("deep/file", at("relative"));
  fs::create_symlink(at("relative"), at("absolute"));
  fs::create_symlink("deep/new", at("dangling"));
  for (const char* link : {"relative", "absolute", "dangling"}) {
    OutputFile file = open(at(link));
    file.write(link, std::strlen(link));
    file.commit();
    EXPECT_TRUE(fs::is_symlink(at(link)));
    EXPECT_EQ(contents(at(link)), link);
  }
  EXPECT_EQ(contents(at("deep/file")), "absolute");
  EXPECT_EQ(contents(at("deep/new")), "dangling");
  fs::create_symlink("circle", at("circle"));
  EXPECT_THROW(open(at("circle")), InputError);
}

TEST_P(OutputFileTest, WritesToPipesAsSuch) {
  ASSERT_EQ(::mkfifo(at("pipe").c_str(), 0600), 0);
  const int reader = ::open(at("pipe").c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  OutputFile file = open(at("pipe"));
  file.write("through", 7);
  file.commit();
  std::string text(16, '\0');
  text.resize(std::max<ssize_t>(0, ::read(reader, text.data(), text.size())));
  ::close(reader);
  EXPECT_EQ(text, "through");
  EXPECT_TRUE(fs::is_fifo(at("pipe")));
  EXPECT_THROW(open(at("pipe")), InputError) << "nobody reads it now";
}

TEST_P(OutputFileTest, WritesToDevices) {
  OutputFile nowhere = open("/dev/null");
  nowhere.write("x", 1);
  nowhere.commit();
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  OutputFile full = open("/dev/full");
  EXPECT_THROW(full.write("x", 1), InputError);
}

TEST_P(OutputFileTest, RefusesWhatItCannotWrite) {
  EXPECT_THROW(open(at("no/such/folder")), InputError);
  EXPECT_THROW(open(folder_), InputError);
  EXPECT_THROW(open(""), InputError);
}

TEST_P(OutputFileTest, ALimitOfTheFileSizeIsAnError) {
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);  // as the command has it
  {
    OutputFile file = open(at("a"));
    rlimit small = before;
    small.rlim_cur = 10;
    setrlimit(RLIMIT_FSIZE, &small);
    EXPECT_THROW(file.write("0123456789abcdef", 16), InputError);
    setrlimit(RLIMIT_FSIZE, &before);
  }
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(names().empty());
}

TEST_P(OutputFileTest, KnowsOneFileByAllItsNames) {
  std::ofstream(at("a")) << "x";
  fs::create_hard_link(at("a"), at("hard"));
  fs::create_symlink("a", at("soft"));
  fs::create_symlink("b", at("dangling"));
  EXPECT_EQ(identity(at("a")), identity(at("hard")));
  EXPECT_EQ(identity(at("a")), identity(at("soft")));
  EXPECT_EQ(identity(at("b")), identity(at("dangling")));
  EXPECT_EQ(identity(at("b")), identity(folder_ / "." / "b"));
  EXPECT_NE(identity(at("a")), identity(at("b")));
  EXPECT_NE(identity(at("b")), identity(at("c")));
  EXPECT_EQ(identity("/dev/null"), "");
}

INSTANTIATE_TEST_SUITE_P(Names, OutputFileTest, ::testing::Bool(),
                         [](const auto& unnamed) { return unnamed.param ? "unnamed" : "named"; });

}  // namespace
}  // namespace longspan::launcher
