// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/recovery/fill_slices.h"

#include <ATen/ATen.h>

#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/flight/recorder.h"
#include "lockstep/io/json.h"
#include "lockstep/layout/box.h"
#include "lockstep/memory/tensor_bytes.h"

namespace lockstep::train {
namespace {

using CopyData = std::function<std::span<const std::byte>(const CopyPlace&)>;
using layout::Box;

constexpr int64_t kCopyMessage = int64_t{1} << 25;  // bytes
constexpr std::chrono::minutes kSlowestFill{30};    // others may be filling slices of their own

// A part of a copy that another node has, in messages of at most kCopyMessage bytes.
struct CopyRequest {
  CopyPlace place = {};
  CopiedSlice slice = {};  // that has it; only box, dtype and offset travel
  Box part = {};

  int64_t width() const { return static_cast<int64_t>(size_of(slice.dtype)); }
  std::vector<Box> messages() const { return layout::pieces(part, kCopyMessage / width()); }
};

nlohmann::json ranges_of(const Box& box) {
  nlohmann::json list = nlohmann::json::array();
  for (const auto& [begin, end] : box.ranges) list.push_back({begin, end});
  return list;
}

Box box_of_ranges(const nlohmann::json& list) {
  Box box;
  for (const auto& range : list) box.ranges.push_back({range[0], range[1]});
  return box;
}

std::string text_of_requests(const std::vector<CopyRequest>& requests) {
  nlohmann::json list = nlohmann::json::array();
  for (const auto& [place, slice, part] : requests) {
    list.push_back({place.node, place.keeper, place.region, place.area,
                    static_cast<int>(slice.dtype), slice.offset, ranges_of(slice.box),
                    ranges_of(part)});
  }
  return list.dump();
}

std::vector<CopyRequest> requests_from(const std::string& text) {
  std::vector<CopyRequest> requests;
  for (const auto& entry : io::parse_json(text, "requests for copies")) {
    CopyRequest request{.place = {entry[0], entry[1], entry[2], entry[3]},
                        .part = box_of_ranges(entry[7])};
    request.slice.dtype = static_cast<DType>(entry[4].get<int>());
    request.slice.offset = entry[5];
    request.slice.box = box_of_ranges(entry[6]);
    requests.push_back(std::move(request));
  }
  return requests;
}

// The part of a slice that `part` is, out of an array of `from` into one of `to`.
void copy_part(const Box& part, const Box& from, std::span<const std::byte> source, const Box& to,
               std::span<std::byte> target, int64_t width) {
  layout::for_each_run(part, from, to, [&](const layout::ContiguousRun& run) {
    std::memcpy(target.data() + run.to * width, source.data() + run.from * width,
                static_cast<size_t>(run.size * width));
  });
}

std::span<const std::byte> bytes_of_slice(const CopiedSlice& slice, const CopyPlace& place,
                                          const CopyData& data) {
  return data(place).subspan(slice.offset, slice.bytes());
}

at::Tensor message_of(const Box& part, int64_t width) {
  return at::empty({part.numel() * width}, at::kByte);
}

void send_part(const CopyRequest& request, int to, const CopyData& data, const comm::Group& world) {
  const auto source = bytes_of_slice(request.slice, request.place, data);
  for (const Box& part : request.messages()) {
    const at::Tensor message = message_of(part, request.width());
    copy_part(part, request.slice.box, source, part, memory::bytes_of(message), request.width());
    comm::send(message, to, world, {.timeout = kSlowestFill, .tag = "copies"}).wait();
    flight::show_life();
  }
}

void receive_part(const CopyRequest& request, const Box& held, std::span<std::byte> target,
                  const comm::Group& world) {
  for (const Box& part : request.messages()) {
    const at::Tensor message = message_of(part, request.width());
    comm::recv(message, request.place.keeper, world, {.timeout = kSlowestFill, .tag = "copies"})
        .wait();
    copy_part(part, part, memory::bytes_of(message), held, target, request.width());
    flight::show_life();
  }
}

void fill_slice(const checkpoint::NamedSlice& slice, const std::vector<CopySource>& sources,
                const CopyData& data, int node, const comm::Group& world) {
  const Box& held = slice.placement.slice;
  const at::Tensor& tensor = slice.tensor;
  const CopySource& first = sources.front();
  if (first.part == held && first.slice->box == held && first.from->place.node == node) {
    const auto bytes = bytes_of_slice(*first.slice, first.from->place, data);
    // from_blob takes memory that may be written to; this is read.
    tensor.copy_(at::from_blob(const_cast<std::byte*>(bytes.data()), tensor.sizes(),
                               at::TensorOptions(tensor.scalar_type())));
    return;
  }
  const at::Tensor values = at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()));
  const auto target = memory::bytes_of(values);
  for (const auto& [from, copied, part] : sources) {
    if (from->place.node == node) {
      copy_part(part, copied->box, bytes_of_slice(*copied, from->place, data), held, target,
                static_cast<int64_t>(size_of(copied->dtype)));
    } else {
      receive_part({from->place, *copied, part}, held, target, world);
    }
  }
  tensor.copy_(values);
}

}  // namespace

void fill_slices(const std::vector<checkpoint::NamedSlice>& slices, const SourcesOfSlices& sources,
                 const CopyData& data, int node, const comm::Group& world) {
  std::vector<CopyRequest> mine;
  for (const auto& of_slice : sources) {
    for (const auto& [from, copied, part] : of_slice) {
      if (from->place.node != node) mine.push_back({from->place, *copied, part});
    }
  }
  const auto texts = comm::gather_texts(text_of_requests(mine), world, {.timeout = kSlowestFill});
  // One rank after the other, so that no two ranks wait for each other.
  for (int rank = 0; rank < world.size(); ++rank) {
    if (rank == world.rank()) {
      for (size_t i = 0; i < slices.size(); ++i) {
        if (!sources[i].empty()) fill_slice(slices[i], sources[i], data, node, world);
      }
      continue;
    }
    for (const CopyRequest& request : requests_from(texts[static_cast<size_t>(rank)])) {
      if (request.place.keeper == world.rank()) send_part(request, rank, data, world);
    }
  }
}

}  // namespace lockstep::train
