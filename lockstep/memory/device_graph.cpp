// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/device_graph.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace lockstep::memory {
namespace {

void wait_for(const c10::Stream& other, const c10::Stream& stream) {
  if (other == stream) return;
  c10::Event event(stream.device_type());
  event.record(other);
  event.block(stream);
}

}  // namespace

std::optional<c10::Stream> own_stream(c10::Device device) {
  if (!device.is_cuda()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

OnStream::OnStream(const std::optional<c10::Stream>& stream) {
  if (!stream) return;
  wait_for(c10::impl::VirtualGuardImpl(stream->device_type()).getStream(stream->device()), *stream);
  guard_.reset_stream(*stream);
}

OnStream::~OnStream() {
  if (guard_.original_stream()) wait_for(*guard_.current_stream(), *guard_.original_stream());
}

}  // namespace lockstep::memory
