// SPDX-License-Identifier: Apache-2.0
#include <lz4.h>

#include <algorithm>
#include <cstring>

#include "lockstep/codec/checksum.h"
#include "lockstep/codec/codec.h"
#include "lockstep/codec/lossless_format.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::codec {
namespace {

using detail::Head;
using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

// A width that the compiler knows makes one pass with vector instructions of it.
template <size_t kWidth>
void split(const std::byte* __restrict chunk, std::byte* __restrict planes, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    for (size_t k = 0; k < kWidth; ++k) planes[k * count + i] = chunk[i * kWidth + k];
  }
}
template <size_t kWidth>
void join_planes(const std::byte* __restrict planes, std::byte* __restrict chunk, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    for (size_t k = 0; k < kWidth; ++k) chunk[i * kWidth + k] = planes[k * count + i];
  }
}

// Bytes after the last whole element follow the planes.
void split(ConstBytes chunk, std::byte* planes, size_t width) {
  const size_t count = chunk.size() / width;
  if (width == 4) {
    split<4>(chunk.data(), planes, count);
  } else if (width == 2) {
    split<2>(chunk.data(), planes, count);
  } else {
    for (size_t k = 0; k < width; ++k) {
      for (size_t i = 0; i < count; ++i) planes[k * count + i] = chunk[i * width + k];
    }
  }
  std::copy(chunk.begin() + static_cast<std::ptrdiff_t>(count * width), chunk.end(),
            planes + count * width);
}

void join_planes(const std::byte* planes, Bytes chunk, size_t width) {
  const size_t count = chunk.size() / width;
  if (width == 4) {
    join_planes<4>(planes, chunk.data(), count);
  } else if (width == 2) {
    join_planes<2>(planes, chunk.data(), count);
  } else {
    for (size_t k = 0; k < width; ++k) {
      for (size_t i = 0; i < count; ++i) chunk[i * width + k] = planes[k * count + i];
    }
  }
  std::copy(planes + count * width, planes + chunk.size(),
            chunk.begin() + static_cast<std::ptrdiff_t>(count * width));
}

// Sizes of what is compressed by itself in a chunk of `bytes`: the planes, then the rest.
template <class Body>
void for_each_plane(size_t bytes, size_t width, const Body& body) {
  const size_t count = bytes / width;
  for (size_t k = 0; k < width && count > 0; ++k) body(k * count, count);
  if (bytes % width > 0) body(count * width, bytes % width);
}

void append_plane(std::vector<std::byte>& to, const std::byte* plane, size_t size) {
  const size_t start = to.size();
  to.resize(start + sizeof(uint32_t) + size);
  // Less room than the plane has: what does not become smaller fails.
  const int packed =
      LZ4_compress_default(reinterpret_cast<const char*>(plane),
                           reinterpret_cast<char*>(to.data() + start + sizeof(uint32_t)),
                           static_cast<int>(size), static_cast<int>(size) - 1);
  auto length = static_cast<uint32_t>(packed);
  if (packed <= 0) {
    length = static_cast<uint32_t>(size) | detail::kRaw;
    std::memcpy(to.data() + start + sizeof length, plane, size);
  } else {
    to.resize(start + sizeof length + length);
  }
  std::memcpy(to.data() + start, &length, sizeof length);
}

[[noreturn]] void damaged(const std::string& how) {
  throw Error("[decompress] the compressed bytes are damaged: " + how);
}

// Takes the next `size` bytes off `packed`.
ConstBytes take(ConstBytes& packed, size_t size) {
  if (packed.size() < size) {
    damaged(format("{} bytes are left where {} are needed", packed.size(), size));
  }
  const ConstBytes taken = packed.first(size);
  packed = packed.subspan(size);
  return taken;
}

void read_plane(ConstBytes& packed, std::byte* plane, size_t size) {
  uint32_t length;
  std::memcpy(&length, take(packed, sizeof length).data(), sizeof length);
  if ((length & detail::kRaw) != 0) {
    length &= ~detail::kRaw;
    if (length != size) damaged(format("{} bytes are kept of a plane of {}", length, size));
    std::memcpy(plane, take(packed, size).data(), size);
    return;
  }
  if (length >= size) damaged(format("{} bytes stand for a plane of {}", length, size));
  const int got = LZ4_decompress_safe(reinterpret_cast<const char*>(take(packed, length).data()),
                                      reinterpret_cast<char*>(plane), static_cast<int>(length),
                                      static_cast<int>(size));
  if (got != static_cast<int>(size)) damaged(format("a plane of {} bytes came out wrong", size));
}

}  // namespace

std::vector<std::byte> compress(std::span<const std::byte> bytes, size_t width) {
  check(width >= 1 && width <= detail::kMaxWidth, "elements to compress have 1 to 16 bytes");
  std::vector<std::byte> packed(sizeof(Head));
  packed.reserve(sizeof(Head) + bytes.size() + bytes.size() / 256 + 256);
  const size_t chunk = detail::chunk_bytes(width);
  std::vector<std::byte> planes(std::min(chunk, bytes.size()));
  for (size_t begin = 0; begin < bytes.size(); begin += chunk) {
    const ConstBytes part = bytes.subspan(begin, std::min(chunk, bytes.size() - begin));
    split(part, planes.data(), width);
    for_each_plane(part.size(), width, [&](size_t offset, size_t size) {
      append_plane(packed, planes.data() + offset, size);
    });
  }
  Head head{.checksum = 0,
            .bytes = bytes.size(),
            .width = static_cast<uint32_t>(width),
            .magic = detail::kMagic};
  std::memcpy(packed.data(), &head, sizeof head);
  head.checksum = checksum(ConstBytes(packed).subspan(sizeof head.checksum));
  std::memcpy(packed.data(), &head.checksum, sizeof head.checksum);
  return packed;
}

size_t compressed_bound(size_t bytes, size_t width) {
  const size_t chunk = detail::chunk_bytes(width);
  const size_t chunks = (bytes + chunk - 1) / chunk;
  return sizeof(Head) + bytes + chunks * (width + 1) * sizeof(uint32_t);  // a length for each plane
}

void decompress(std::span<const std::byte> packed, std::span<std::byte> bytes) {
  ConstBytes rest = packed;
  Head head;
  std::memcpy(&head, take(rest, sizeof head).data(), sizeof head);
  if (head.magic != detail::kMagic) damaged("they do not begin as compress() begins them");
  if (head.checksum != checksum(packed.subspan(sizeof head.checksum))) {
    damaged("their checksum is wrong");
  }
  if (head.bytes != bytes.size()) {
    throw Error(format("[decompress] there is room for {} bytes, and {} were compressed",
                       bytes.size(), head.bytes));
  }
  if (head.width < 1 || head.width > detail::kMaxWidth) {
    damaged(format("elements of {} bytes", head.width));
  }
  const size_t chunk = detail::chunk_bytes(head.width);
  std::vector<std::byte> planes(std::min(chunk, bytes.size()));
  for (size_t begin = 0; begin < bytes.size(); begin += chunk) {
    const Bytes part = bytes.subspan(begin, std::min(chunk, bytes.size() - begin));
    for_each_plane(part.size(), head.width, [&](size_t offset, size_t size) {
      read_plane(rest, planes.data() + offset, size);
    });
    join_planes(planes.data(), part, head.width);
  }
  if (!rest.empty()) damaged(format("{} bytes too many", rest.size()));
}

}  // namespace lockstep::codec
