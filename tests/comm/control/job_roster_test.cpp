// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/control/job_roster.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace lockstep::comm::detail {
namespace {

TEST(RendezvousPlaces, AllAddressesAreOfferedInOneOrder) {
  EXPECT_EQ(places("", {"172.17.0.1", "fd00::1", "10.0.0.1"}, 5),
            "172.17.0.1:5,10.0.0.1:5,[fd00::1]:5");
  EXPECT_EQ(places("", {"fd00::1"}, 5), "[fd00::1]:5");
  EXPECT_EQ(places("node0", {"fd00::1", "10.0.0.1"}, 5), "node0:5,10.0.0.1:5,[fd00::1]:5");
  EXPECT_EQ(places("", {}, 5), host_name() + ":5");
}

TEST(RendezvousPlaces, ManyAddressesAreCutToSixteen) {
  const std::string text = places("node0", std::vector<std::string>(1000, "10.0.0.1"), 5);
  EXPECT_EQ(std::count(text.begin(), text.end(), ','), 15);
  EXPECT_TRUE(text.starts_with("node0:5,"));
}

}  // namespace
}  // namespace lockstep::comm::detail
