// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "lockstep/codec/checksum.h"
#include "lockstep/codec/codec.h"
#include "lockstep/codec/lossless_format.h"
#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep::codec {
namespace {

using test::says;
using testing::HasSubstr;
using testing::ThrowsMessage;
using Bytes = std::vector<std::byte>;

Bytes random_bytes(size_t count) {
  std::mt19937 random(5);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

Bytes gaussian(size_t count, float size = 1) {
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = size * normal(random);
  Bytes bytes(count * 4);
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

Bytes unpacked(const Bytes& packed, size_t size) {
  Bytes bytes(size, std::byte{0xee});
  decompress(packed, bytes);
  return bytes;
}

TEST(Lossless, EveryByteComesBack) {
  for (const size_t width : {1, 2, 3, 4, 8, 16}) {
    for (const size_t size : {0, 1, 2, 3, 5, 15, 16, 17, 4096, 65535, 65536, 65537, 200003}) {
      for (const Bytes& bytes : {random_bytes(size), Bytes(size), gaussian(size / 4 + 1)}) {
        const Bytes packed = compress(bytes, width);
        ASSERT_EQ(unpacked(packed, bytes.size()), bytes) << width << " " << size;
        // A few bytes more: a head, and a length for each plane of a chunk.
        const size_t chunks = bytes.size() / detail::chunk_bytes(width) + 1;
        EXPECT_LE(packed.size(), bytes.size() + sizeof(detail::Head) + chunks * (width + 1) * 4);
      }
    }
  }
}

TEST(Lossless, WhatRepeatsBecomesSmaller) {
  EXPECT_LT(compress(Bytes(1 << 20), 4).size(), 10000u);
  // Values of about one size share their first byte, or nearly.
  std::mt19937 random(7);
  std::uniform_real_distribution<float> uniform(1, 2);
  std::vector<float> values(1 << 16);
  for (float& value : values) value = uniform(random);
  Bytes bytes(values.size() * 4);
  std::memcpy(bytes.data(), values.data(), bytes.size());
  EXPECT_LT(compress(bytes, 4).size(), bytes.size() * 77 / 100);
  EXPECT_GT(compress(bytes, 1).size(), bytes.size() * 95 / 100) << "not without planes";
}

TEST(Lossless, WrongRoomIsRefused) {
  const Bytes packed = compress(Bytes(100), 4);
  Bytes room(99);
  EXPECT_THAT([&] { decompress(packed, room); },
              ThrowsMessage<Error>(HasSubstr("room for 99 bytes, and 100 were compressed")));
  EXPECT_THROW(compress(room, 0), std::logic_error);
  EXPECT_THROW(compress(room, 17), std::logic_error);
}

// One way to damage bytes: change, cut, lengthen or swap some.
Bytes mutant(Bytes bytes, std::mt19937& random) {
  const size_t at = random() % bytes.size();
  switch (random() % 4) {
    case 0:
      bytes[at] ^= static_cast<std::byte>(1 << random() % 8);
      break;
    case 1:
      bytes.resize(at);
      break;
    case 2:
      bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                   static_cast<std::byte>(random()));
      break;
    default:
      for (size_t i = at; i < std::min(at + 4, bytes.size()); ++i) {
        bytes[i] = static_cast<std::byte>(random());
      }
  }
  return bytes;
}

TEST(Lossless, DamageIsRefused) {
  std::mt19937 random(8);
  for (const Bytes& bytes : {gaussian(3000), Bytes(50000), random_bytes(1001)}) {
    const Bytes packed = compress(bytes, 4);
    for (int i = 0; i < 2000; ++i) {
      const Bytes damaged = mutant(packed, random);
      if (damaged == packed) continue;
      Bytes room(bytes.size());
      EXPECT_THROW(decompress(damaged, room), Error) << i;
    }
  }
}

void seal(Bytes& packed) {
  const uint64_t sum = checksum(std::span(packed).subspan(sizeof sum));
  std::memcpy(packed.data(), &sum, sizeof sum);
}

TEST(Lossless, APlaneHasItsLength) {
  const Bytes bytes = random_bytes(1001);
  Bytes packed = compress(bytes, 1);
  ASSERT_EQ(packed.size(), sizeof(detail::Head) + 4 + bytes.size());  // one plane, as it is
  packed[sizeof(detail::Head)] ^= std::byte{1};
  seal(packed);
  Bytes room(bytes.size());
  EXPECT_THAT([&] { decompress(packed, room); },
              ThrowsMessage<Error>(says("1000 bytes ... plane of 1001")));
}

// With a checksum that fits, what is behind it has to hold by itself: an Error, or some bytes, and
// never a byte beyond the room or the input.
TEST(Lossless, DamageBehindTheChecksumDoesNotCrash) {
  std::mt19937 random(9);
  int refused = 0;
  for (const Bytes& bytes : {gaussian(3000, 1e-3f), Bytes(70000), random_bytes(1001)}) {
    const Bytes packed = compress(bytes, 4);
    for (int i = 0; i < 2000; ++i) {
      Bytes damaged = mutant(packed, random);
      if (damaged.size() < sizeof(detail::Head)) continue;
      seal(damaged);
      // In an allocation of its own, where a sanitizer sees every step outside.
      Bytes room(bytes.size());
      try {
        decompress(damaged, room);
      } catch (const Error&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace lockstep::codec
