// One connection of the TCP control plane: frames before its end are returned, however the end is
// found.
#include "comm/tcp/frames.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <utility>

namespace longspan::comm {
namespace {

std::pair<Frames, Frames> connection() {
  int ends[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  return {Frames(Fd(ends[0]), kMostText), Frames(Fd(ends[1]), kMostText)};
}

TEST(Frames, GivesWhatCameBeforeTheEnd) {
  auto [here, there] = connection();
  there.push({Frame::text, 3, "the verdict"});
  there.write();
  { const Frames ended = std::move(there); }
  here.read();
  const auto frame = here.next();
  ASSERT_TRUE(frame.has_value());
  EXPECT_EQ(frame->body, "the verdict");
  EXPECT_EQ(frame->peer, 3u);
  EXPECT_FALSE(here.next().has_value());
  EXPECT_FALSE(here.open());
}

/// A rank that comes back late writes first.
TEST(Frames, GivesWhatCameBeforeTheEndToWhoWritesToItFirst) {
  auto [here, there] = connection();
  there.push({Frame::text, 0, "the verdict"});
  there.write();
  { const Frames ended = std::move(there); }
  for (int letter = 0; letter < 3; ++letter) {
    here.push({Frame::text, 0, "I am back"});
    here.write();
  }
  EXPECT_FALSE(here.wants_to_write());
  here.read();
  const auto frame = here.next();
  ASSERT_TRUE(frame.has_value());
  EXPECT_EQ(frame->body, "the verdict");
  EXPECT_FALSE(here.open());
}

}  // namespace
}  // namespace longspan::comm
