// SPDX-License-Identifier: Apache-2.0
// Packed state on CUDA has the CPU's bits: parameters, moments, scales and remainders.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>

#include "lockstep/optim/kernels/packed_update.h"
#include "tests/optim/kernels/packed_adamw_support.h"

namespace lockstep::optim::detail {
namespace {

using codec::Codec;

at::Tensor on_cpu(const void* data, size_t bytes) {
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)}, at::kByte).clone();
}

// `shift` bytes after an aligned address.
void expect_same_bits(const PackedFormat& format, int64_t elements, int64_t shift,
                      SgdKind kind = SgdKind::momentum) {
  const auto count = static_cast<size_t>(elements);
  const size_t param_bytes = count * size_of(format.param);
  const size_t grad_bytes = count * size_of(format.grad);
  const Array weights(format.param, random_values(count, 11));
  at::Tensor param = on_cpu(weights.data(), param_bytes);
  at::Tensor state =
      at::zeros({static_cast<int64_t>(packed_layout(format, elements).total)}, at::kByte);
  const PackedSlice cpu{param.data_ptr(), nullptr, static_cast<std::byte*>(state.data_ptr()),
                        elements};
  pack(format, cpu, {});
  const auto to_device = [&](const at::Tensor& from) {
    const at::Tensor room = at::empty({from.numel() + shift}, from.options().device(at::kCUDA));
    return room.narrow(0, shift, from.numel()).copy_(from);
  };
  const at::Tensor device_param = to_device(param), device_state = to_device(state);
  for (int step = 1; step <= 5; ++step) {
    auto values = random_values(count, step);
    // A block of zeros, and one whose largest value is negative.
    for (size_t i = 0; i < count; ++i) {
      if (i / 256 == 3) values[i] = 0;
      if (i / 256 == 4) values[i] = -std::fabs(values[i]);
    }
    const Array grads(format.grad, values);
    const at::Tensor grad = to_device(on_cpu(grads.data(), grad_bytes));
    const PackedFactors factors = factors_for(format, step, kind);
    packed_update(format, {cpu.param, grads.data(), cpu.state, elements}, factors);
    optim::cuda::launch_packed_update(format,
                                      {device_param.data_ptr(), grad.data_ptr(),
                                       static_cast<std::byte*>(device_state.data_ptr()), elements},
                                      factors, c10::cuda::getCurrentCUDAStream().stream());
    ASSERT_TRUE(at::equal(device_param.cpu(), param)) << step;
    ASSERT_TRUE(at::equal(device_state.cpu(), state)) << step;
  }
}

// A coded parameter: codes, scales and remainders, and what a model computes with.
void expect_same_codes(const PackedFormat& format, int64_t elements) {
  const auto count = static_cast<size_t>(elements);
  const auto layout = codec::coded_layout(format.weight, elements);
  at::Tensor weight = at::zeros({static_cast<int64_t>(layout.total)}, at::kByte);
  at::Tensor state =
      at::zeros({static_cast<int64_t>(packed_layout(format, elements).total)}, at::kByte);
  const auto array = [&](const at::Tensor& memory) {
    auto* const base = static_cast<std::byte*>(memory.data_ptr());
    const bool scaled = codec::scales_size(format.weight, elements) > 0;
    return codec::CodedArray{format.weight, base,
                             scaled ? reinterpret_cast<float*>(base + layout.scales) : nullptr,
                             reinterpret_cast<int8_t*>(base + layout.remainder)};
  };
  codec::split(random_values(count, 11).data(), array(weight), elements);
  const at::Tensor device_weight = weight.cuda(), device_state = state.cuda();
  void* const stream = c10::cuda::getCurrentCUDAStream().stream();
  for (int step = 1; step <= 5; ++step) {
    auto values = random_values(count, step);
    const Array grads(format.grad, values);
    const at::Tensor grad = on_cpu(grads.data(), count * size_of(format.grad)).cuda();
    packed_update(format,
                  {.param = nullptr,
                   .grad = grads.data(),
                   .state = static_cast<std::byte*>(state.data_ptr()),
                   .elements = elements,
                   .weight = array(weight)},
                  factors_for(format, step));
    optim::cuda::launch_packed_update(format,
                                      {.param = nullptr,
                                       .grad = grad.data_ptr(),
                                       .state = static_cast<std::byte*>(device_state.data_ptr()),
                                       .elements = elements,
                                       .weight = array(device_weight)},
                                      factors_for(format, step), stream);
    ASSERT_TRUE(at::equal(device_weight.cpu(), weight)) << step;
    ASSERT_TRUE(at::equal(device_state.cpu(), state)) << step;
  }
  at::Tensor decoded = at::empty({elements}), there = at::empty({elements}, at::kCUDA);
  codec::decode_codes(array(weight), decoded.data_ptr<float>(), elements);
  optim::cuda::launch_decode(array(device_weight), elements, DType::float32, there.data_ptr(),
                             stream);
  EXPECT_TRUE(at::equal(there.cpu(), decoded));
  there = at::empty({elements}, at::TensorOptions().dtype(at::kBFloat16).device(at::kCUDA));
  optim::cuda::launch_decode(array(device_weight), elements, DType::bfloat16, there.data_ptr(),
                             stream);
  EXPECT_TRUE(at::equal(there.cpu(), decoded.to(at::kBFloat16)));
  there = at::empty({elements}, at::TensorOptions().dtype(at::kHalf).device(at::kCUDA));
  optim::cuda::launch_decode(array(device_weight), elements, DType::float16, there.data_ptr(),
                             stream);
  EXPECT_TRUE(at::equal(there.cpu(), decoded.to(at::kHalf)));
}

TEST(PackedAdamWCuda, CodedParametersHaveTheCpusBits) {
  for (const Codec weight : {Codec::bf16, Codec::int8, Codec::quantization}) {
    for (const DType grad : {DType::float32, DType::bfloat16}) {
      for (const int64_t elements : {int64_t{1}, int64_t{700}, int64_t{5000}}) {
        expect_same_codes({.param = DType::float32, .grad = grad, .weight = weight}, elements);
        expect_same_codes({.param = DType::float32,
                           .grad = grad,
                           .exp_avg = Codec::int8,
                           .exp_avg_sq = Codec::quantization,
                           .weight = weight},
                          elements);
        for (const int moments : {0, 1}) {
          expect_same_codes({.param = DType::float32,
                             .grad = grad,
                             .exp_avg = Codec::int8,
                             .weight = weight,
                             .moments = moments},
                            elements);
        }
      }
    }
  }
}

TEST(PackedAdamWCuda, HasTheCpusBits) {
  for (const auto& [param, grad] : {std::pair{DType::float32, DType::float32},
                                    {DType::bfloat16, DType::bfloat16},
                                    {DType::bfloat16, DType::float32}}) {
    for (const Codec exp_avg : kPackedCodecs) {
      for (const Codec exp_avg_sq : {exp_avg, Codec::none}) {
        for (const int64_t elements : {1, 255, 256, 257, 100003}) {
          for (const int64_t shift : {0, 4}) {
            SCOPED_TRACE(std::string(name_of(param)) + " " + std::string(name_of(grad)) + " " +
                         std::string(codec::name_of(exp_avg)) + " " +
                         std::string(codec::name_of(exp_avg_sq)) + " " + std::to_string(elements) +
                         " " + std::to_string(shift));
            expect_same_bits({param, grad, exp_avg, exp_avg_sq}, elements, shift);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(PackedUpdateCuda, OtherRulesAndTypesHaveTheCpusBits) {
  constexpr DType kAll[] = {DType::float64, DType::float32, DType::float16, DType::bfloat16};
  for (const DType param : kAll) {
    for (const DType grad : kAll) {
      if (param == DType::float64 && grad != param) continue;
      for (const int moments : {0, 1, 2}) {
        for (const Codec codec : kPackedCodecs) {
          if (codec != Codec::none && (param == DType::float64 || moments == 0)) continue;
          for (const int64_t elements : {1, 257, 10003}) {
            for (const int64_t shift : {0, 8}) {
              SCOPED_TRACE(std::string(name_of(param)) + " " + std::string(name_of(grad)) + " " +
                           std::to_string(moments) + " " + std::string(codec::name_of(codec)) +
                           " " + std::to_string(elements) + " " + std::to_string(shift));
              const PackedFormat format{param, grad, codec, codec, Codec::none, moments};
              expect_same_bits(format, elements, shift);
              if (moments == 1) expect_same_bits(format, elements, shift, SgdKind::nesterov);
              if (HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

// Every low half of a master, with marks: a step that changes nothing changes nothing.
TEST(PackedAdamWCuda, MastersSurviveAStep) {
  std::vector<float> masters;
  for (const uint32_t upper : {0x0000u, 0x0001u, 0x3f80u, 0xbf81u, 0x7f7fu, 0x8000u}) {
    for (uint32_t low = 0; low < 0x10000; ++low) {
      masters.push_back(std::bit_cast<float>(upper << 16 | low));
    }
  }
  const auto elements = static_cast<int64_t>(masters.size());
  for (const Codec codec : {Codec::none, Codec::fp16, Codec::bf16}) {
    const PackedFormat format{DType::bfloat16, DType::bfloat16, Codec::none, codec};
    at::Tensor param = at::zeros({elements}, at::kBFloat16);
    at::Tensor state =
        at::zeros({static_cast<int64_t>(packed_layout(format, elements).total)}, at::kByte);
    const PackedSlice cpu{param.data_ptr(), nullptr, static_cast<std::byte*>(state.data_ptr()),
                          elements};
    pack(format, cpu, {nullptr, nullptr, masters.data()});
    const at::Tensor device_param = param.cuda(), device_state = state.cuda();
    const at::Tensor grad = at::zeros_like(device_param);
    AdamWFactors factors = factors_of_step(1);
    factors.decay = 1;
    for (int i = 0; i < 2; ++i) {
      optim::cuda::launch_packed_update(
          format,
          {device_param.data_ptr(), grad.data_ptr(),
           static_cast<std::byte*>(device_state.data_ptr()), elements},
          factors, c10::cuda::getCurrentCUDAStream().stream());
    }
    param.copy_(device_param);
    state.copy_(device_state);
    std::vector<float> after(masters.size());
    unpack(format, cpu, {nullptr, nullptr, after.data()});
    EXPECT_EQ(bits_of(after), bits_of(masters));
  }
}

}  // namespace
}  // namespace lockstep::optim::detail
