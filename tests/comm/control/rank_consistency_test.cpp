// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/control/rank_consistency.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(RequireSame, EqualTextsPass) {
  run_threads(3, [](const Group& group) { require_same("a = 1\nb = 2\n", group); });
  require_same("alone", Group());
}

TEST(RequireSame, AllRanksNameTheFirstLineThatDiffers) {
  std::mutex mutex;
  std::multiset<std::string> messages;
  run_threads(4, [&](const Group& group) {
    try {
      require_same(group.rank() == 2 ? "a = 1\nb = 3\nc = 4\n" : "a = 1\nb = 2\nc = 5\n", group);
    } catch (const ConfigError& error) {
      const std::lock_guard lock(mutex);
      messages.insert(error.what());
    }
  });
  ASSERT_EQ(messages.size(), 4u);
  EXPECT_EQ(messages.count(*messages.begin()), 4u);
  EXPECT_THAT(*messages.begin(),
              AllOf(HasSubstr("b = 2 on ranks 0, 1, 3 ("), HasSubstr("; b = 3 on rank 2 (")));
}

TEST(RequireSame, AnExtraLineIsADifference) {
  EXPECT_EQ(detail::difference({{"x", {"a", "b"}}, {"y", {"a"}}}),
            "b on rank 0 (x); nothing on rank 1 (y)");
  EXPECT_EQ(detail::difference({{"x", {"a"}}, {"y", {"a"}}}), "");
}

}  // namespace
}  // namespace lockstep::comm
