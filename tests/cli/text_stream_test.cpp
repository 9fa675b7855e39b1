// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/infer/text_stream.h"

#include <gtest/gtest.h>

namespace lockstep::cli {
namespace {

TEST(TextStream, ShowsWholeCharacters) {
  TextStream stream({});
  EXPECT_EQ(stream.push("a\xC3"), "a");
  EXPECT_EQ(stream.push("\xA9"), "\xC3\xA9");
  EXPECT_EQ(stream.push("\xF0\x9F"), "");
  EXPECT_EQ(stream.push("\x98"), "");
  EXPECT_EQ(stream.push("\x80!"), "\xF0\x9F\x98\x80!");
  EXPECT_EQ(stream.push("\xE2"), "");
  EXPECT_EQ(stream.finish(), "\xE2");  // what was generated, even if it is no character
  // Bytes that cannot be the middle of one are not waited for.
  EXPECT_EQ(stream.push("\x80\x80\x80\x80"), "\x80\x80\x80\x80");
  EXPECT_EQ(stream.text(), "a\xC3\xA9\xF0\x9F\x98\x80!\xE2\x80\x80\x80\x80");
}

TEST(TextStream, EndsBeforeAStopTextAcrossTokens) {
  TextStream stream({"END", "\n\n"});
  EXPECT_EQ(stream.push("one E"), "one ");
  EXPECT_EQ(stream.push("N"), "");
  EXPECT_EQ(stream.push("TRY"), "ENTRY");  // it was another word
  EXPECT_EQ(stream.push("\n"), "");
  EXPECT_EQ(stream.push("two E"), "\ntwo ");
  EXPECT_FALSE(stream.has_stopped());
  EXPECT_EQ(stream.push("ND and more"), "");
  EXPECT_TRUE(stream.has_stopped());
  EXPECT_EQ(stream.push("more"), "");
  EXPECT_EQ(stream.finish(), "");
  EXPECT_EQ(stream.text(), "one ENTRY\ntwo ");
}

TEST(TextStream, TheFirstOfSeveralStopTextsCounts) {
  TextStream stream({"bb", "abbc"});
  EXPECT_EQ(stream.push("xabbc"), "x");
  EXPECT_TRUE(stream.has_stopped());
  TextStream other({"aab"});
  EXPECT_EQ(other.push("aa"), "");
  EXPECT_EQ(other.push("ab"), "a");
  EXPECT_TRUE(other.has_stopped());
}

}  // namespace
}  // namespace lockstep::cli
