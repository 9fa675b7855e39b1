// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/rendezvous/network_interface.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/core/error.h"

namespace lockstep::launch {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

template <class Call>
std::string refusal(Call call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Interface, HasAnAddress) {
  EXPECT_EQ(address_of_interface("lo"), "127.0.0.1");
  EXPECT_EQ(address_of_interface("lo", "10.0.0.1"), "127.0.0.1");
}

TEST(Interface, AMissingInterfaceIsAnErrorThatListsTheOthers) {
  EXPECT_THAT(refusal([] { address_of_interface("eth77"); }),
              AllOf(HasSubstr("no 'eth77'; there are "), HasSubstr("lo (127.0.0.1")));
}

TEST(Interface, LoopbackIsNotForOthers) {
  for (const std::string& address : outward_addresses()) EXPECT_FALSE(is_loopback(address));
  EXPECT_TRUE(is_loopback("127.0.1.1"));
  EXPECT_TRUE(is_loopback("::1"));
  EXPECT_FALSE(is_loopback("10.0.0.127"));
}

TEST(Interface, ListensOnTheGivenAddressOrTheNamedInterface) {
  EXPECT_EQ(listening_address({"somewhere", 1}, "").text(), "somewhere:1");
  EXPECT_EQ(listening_address({"127.0.0.1", 1}, "lo").text(), "127.0.0.1:1");
  EXPECT_EQ(listening_address({"0.0.0.0", 1}, "lo").text(), "127.0.0.1:1");
  // Not an address of this machine: something between us and the others translates it.
  EXPECT_EQ(listening_address({"192.0.2.1", 1}, "lo").text(), "127.0.0.1:1");
  const auto others = outward_addresses();
  if (others.empty()) return;  // a machine without a network
  EXPECT_THAT(refusal([&] {
                listening_address({others.front(), 1}, "lo");
              }),
              AllOf(HasSubstr("which is " + others.front() + " on "), HasSubstr("not on lo")));
}

TEST(Interface, AddressesOfBothFamiliesAreReadAndWritten) {
  EXPECT_EQ(parse_host_port("[fd00::1]:29400", "test").host, "fd00::1");
  EXPECT_EQ(parse_host_port("[fd00::1]:29400", "test").text(), "[fd00::1]:29400");
  const auto places = parse_host_ports("10.0.0.1:5,[fd00::1]:6,name:7", "test");
  ASSERT_EQ(places.size(), 3u);
  EXPECT_EQ(places[1].host, "fd00::1");
  EXPECT_EQ(places[2].text(), "name:7");
  EXPECT_THAT(refusal([] { parse_host_port("fd00::1:29400", "test"); }), HasSubstr("HOST:PORT"));
  EXPECT_THAT(refusal([] { parse_host_ports("a:1,,b:2", "test"); }), HasSubstr("HOST:PORT"));
  EXPECT_THAT(refusal([] { parse_host_ports("", "test"); }), HasSubstr("HOST:PORT"));
}

}  // namespace
}  // namespace lockstep::launch
