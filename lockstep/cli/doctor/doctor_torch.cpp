// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/doctor/doctor_torch.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>
#include <torch/cuda.h>
#include <torch/version.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <set>

#include "lockstep/cli/doctor/report.h"
#include "lockstep/comm/backends/nccl/api.h"
#include "lockstep/comm/backends/nccl/nccl.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/kernels/can_multiply.h"

namespace lockstep::cli {
namespace {

constexpr double kSecondsEach = 0.3;

void report(Verdict verdict, const std::string& what, const std::string& text) {
  print(std::cout, {verdict, what, text});
}

// The first line of an exception; libtorch's messages continue with a stack.
std::string first_line(const std::exception& failure) {
  const std::string text = failure.what();
  return text.substr(0, text.find('\n'));
}

double gigaflops(int64_t n, at::Device device, at::ScalarType dtype) {
  return nn::multiply_rate(n, dtype, device, kSecondsEach);
}

// The libraries with matrix products that this process has loaded, all links followed.
std::set<std::string> loaded_blas() {
  std::set<std::string> found;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t start = line.find('/');
    if (start == std::string::npos) continue;
    const std::string path = line.substr(start);
    const std::string name = std::filesystem::path(path).filename().string();
    for (const char* part : {"libblas", "openblas", "libmkl", "libblis", "libarmpl", "libnvpl"})
      if (name.find(part) != std::string::npos && name.find("lapack") == std::string::npos)
        found.insert(path);
  }
  return found;
}

void report_blas() {
  const auto libraries = loaded_blas();
  if (libraries.empty()) {
    report(Verdict::ok, "BLAS", "built into libtorch");
    return;
  }
  // A thin libblas.so.3 may stand before the library that does the work.
  bool said = false;
  for (const std::string& path : libraries) {
    const Finding finding = judge_blas(path);
    if (finding.verdict == Verdict::ok && said) continue;
    print(std::cout, finding);
    said = true;
  }
}

// False where the CPU cannot multiply.
bool report_speed() {
  const int all = at::get_num_threads();
  try {
    at::set_num_threads(1);
    const double one = gigaflops(1024, at::kCPU, at::kFloat);
    at::set_num_threads(all);
    std::string text = format("{:.0f} GFLOP/s with one thread", one);
    bool scales = true;
    if (all > 1) {
      const double many = gigaflops(1024, at::kCPU, at::kFloat);
      text += format(", {:.0f} with {}", many, all);
      scales = many > 1.2 * one;
    }
    if (one < 10) {
      report(Verdict::warning, "float32", text + ": slow; see BLAS, and the build's processor");
    } else if (!scales) {
      report(Verdict::note, "float32",
             text + ": more threads do not help; other work or a CPU limit takes the cores");
    } else {
      report(Verdict::ok, "float32", text);
    }
    return true;
  } catch (const std::exception& failure) {
    at::set_num_threads(all);
    report(Verdict::problem, "float32",
           format("matrix products fail: {}; install another libtorch", first_line(failure)));
    return false;
  }
}

void report_bfloat16() {
  constexpr int64_t kSide = 256;  // slow ones would take seconds for larger matrices
  try {
    const double half = gigaflops(kSide, at::kCPU, at::kBFloat16);
    const std::string slow =
        nn::slower_than_float32(nn::layer_rate(kSide, at::kBFloat16, at::kCPU, kSecondsEach),
                                nn::layer_rate(kSide, at::kFloat, at::kCPU, kSecondsEach));
    report(slow.empty() ? Verdict::ok : Verdict::note, "bfloat16",
           format("{}{:.1f} GFLOP/s for {} x {}", slow.empty() ? "usable, " : "slow, ", half, kSide,
                  kSide) +
               (slow.empty() ? "" : format(": a layer takes {}; train with float32", slow)));
  } catch (const std::exception& failure) {
    report(Verdict::note, "bfloat16",
           format("not usable on this CPU ({}): train.dtype must be float32", first_line(failure)));
  }
}

// Free and total bytes of the current GPU, asked of the runtime that libtorch has loaded: there may
// be no CUDA toolkit to compile against.
std::optional<std::pair<size_t, size_t>> gpu_memory() {
  using MemGetInfo = int (*)(size_t*, size_t*);
  const auto ask = reinterpret_cast<MemGetInfo>(dlsym(RTLD_DEFAULT, "cudaMemGetInfo"));
  size_t free = 0, total = 0;
  if (ask == nullptr || ask(&free, &total) != 0) return std::nullopt;
  return std::pair(free, total);
}

void report_gpu(int index) {
  const std::string what = format("GPU {}", index);
  try {
    const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
    const c10::DeviceGuard guard(device);
    const double single = gigaflops(4096, device, at::kFloat),
                 half = gigaflops(4096, device, at::kBFloat16);
    const std::string slow = nn::slower_than_float32(half, single);
    std::string text;
    if (const auto memory = gpu_memory())
      text = format("{}, {} free; ", gigabytes(static_cast<double>(memory->second)),
                    gigabytes(static_cast<double>(memory->first)));
    report(slow.empty() ? Verdict::ok : Verdict::note, what,
           text + format("{:.1f} TFLOP/s float32, {:.1f} bfloat16", single / 1e3, half / 1e3) +
               (slow.empty() ? "" : format(" (slow: {}); train with float32", slow)));
  } catch (const std::exception& failure) {
    report(Verdict::warning, what,
           format("does not compute: {}; choose others with CUDA_VISIBLE_DEVICES",
                  first_line(failure)));
  }
}

void report_nccl() {
  const std::string problem = comm::nccl::problem();
  const int version = comm::nccl::library().version;
  report(problem.empty() ? Verdict::ok : Verdict::note, "NCCL",
         problem.empty() ? format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100)
                         : problem + ": ranks exchange CUDA tensors through host memory");
}

}  // namespace

int doctor_torch(const std::vector<std::string>& arguments) {
  if (!arguments.empty()) throw ConfigError(format("doctor: '{}' is not known", arguments[0]));
  report(Verdict::ok, "libtorch",
         format("{}; oneDNN {}, OpenMP {}, {} thread{}", TORCH_VERSION,
                at::hasMKLDNN() ? "yes" : "no", at::hasOpenMP() ? "yes" : "no",
                at::get_num_threads(), at::get_num_threads() > 1 ? "s" : ""));
  const bool computes = report_speed();
  report_blas();
  report_bfloat16();
  if (!at::hasCUDA()) {
    const bool gpu = std::filesystem::exists("/dev/nvidia0");
    report(gpu ? Verdict::warning : Verdict::ok, "CUDA",
           gpu ? "no, though there is a GPU: build with a libtorch that has it" : "no");
  } else {
    const auto gpus = static_cast<int>(torch::cuda::device_count());
    report(gpus > 0 ? Verdict::ok : Verdict::note, "CUDA",
           gpus > 0 ? format("{} GPU{}", gpus, gpus > 1 ? "s" : "")
                    : "libtorch has it, but sees no GPU: see CUDA_VISIBLE_DEVICES and the driver");
    for (int i = 0; i < gpus; ++i) report_gpu(i);
    if (gpus > 0) report_nccl();
  }
  return computes ? 0 : 1;
}

}  // namespace lockstep::cli
