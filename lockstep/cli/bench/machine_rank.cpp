// SPDX-License-Identifier: Apache-2.0
// All ranks measure at the same time, as they compute in a step, and the slowest counts; blocks and
// head also on one rank while the others wait, as in the bubbles of a pipeline. Constants
// are found one after the other: products and memory alone first, then what of a whole block they
// do not explain.
#include "lockstep/cli/bench/machine_rank.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>

#include "lockstep/cli/bench/machine_work.h"
#include "lockstep/cli/common/options.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/control/host_layout.h"
#include "lockstep/config/plan/cluster_file.h"
#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/system_memory.h"
#include "lockstep/memory/device_size.h"
#include "lockstep/nn/linear.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/plan/step_time.h"
#include "lockstep/train/device/device.h"
#include "lockstep/train/device/threads.h"

namespace lockstep::cli {
namespace {

using comm::Group;
using plan::Collective;

constexpr int kSamples = 5;  // at least, but for --seconds 0

class MachineBench {
 public:
  MachineBench(const Group& world, const config::TrainConfig& config, double seconds)
      : world_(world),
        device_(train::choose_device(config, world)),
        dtype_(config.train.type() == config::Precision::bfloat16 ? at::kBFloat16 : at::kFloat),
        seconds_(seconds) {
    if (device_.is_cuda()) train::make_current(device_);
    nn::time_products(device_.is_cuda());  // as the trainer does
  }

  config::ClusterFile measure() {
    const auto hosts = comm::host_layout(world_).hosts;
    cluster_.name = config::this_host();
    cluster_.devices_per_node = static_cast<int>(hosts[0].size());
    cluster_.device.name = device_.is_cuda() ? train::cuda_name(device_) : "CPU";
    cluster_.device.memory = static_cast<double>(
        device_.is_cuda() ? memory::device_bytes(device_)
                          : static_cast<int64_t>(available_memory() / hosts[0].size()));
    cluster_.efficiency = {.product = 1, .attention = 1, .memory = 1};
    // What hosts have between them is not measured where there is one: the note says so.
    cluster_.links.host_bandwidth = cluster_.links.network_bandwidth = 1e10;
    stage("products", [&] { products(); });
    stage("memory", [&] { memory_bandwidth(); });
    stage("blocks and head", [&] { blocks(); });
    stage("optimizer", [&] { optimizer(); });
    stage("collectives", [&] { collectives(); });
    stage("messages", [&] { messages(); });
    stage("overlap", [&] { overlap(); });
    stage("waiting", [&] { waiting(); });
    if (world_.rank() == 0) std::cerr << "\n";
    cluster_.error = std::clamp(2 * worst_spread_, 0.08, 0.5);
    cluster_.note = format(
        "measured with {} ranks, spread at most {:.0f} %{}", world_.size(), 100 * worst_spread_,
        hosts.size() > 1 ? ""
                         : "; more ranks count as hosts with 10 GB/s between them, "
                           "which is assumed");
    return {cluster_, config::this_host(), config::this_build(), today()};
  }

 private:
  static constexpr int kStages = 8;

  static std::string today() {
    const std::time_t now = std::time(nullptr);
    std::tm parts{};
    gmtime_r(&now, &parts);
    return format("{:04}-{:02}-{:02}", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday);
  }

  void stage(const char* name, const std::function<void()>& work) {
    if (world_.rank() == 0)
      std::cerr << format("\r[{}{}] {:<16}", std::string(static_cast<size_t>(done_), '#'),
                          std::string(static_cast<size_t>(kStages - done_), '.'), name)
                << std::flush;
    work();
    ++done_;
  }

  void finish() const {
    if (device_.is_cpu()) return;
    const c10::impl::VirtualGuardImpl guard(device_.type());
    guard.synchronizeStream(guard.getStream(device_));
  }
  double slowest(double value) const {
    at::Tensor all = at::full({1}, value, at::kDouble);
    if (device_.is_cuda() && world_.backend() == "nccl") all = all.to(device_);
    comm::all_reduce(all, world_, {.op = comm::ReduceOp::max}).wait();
    return all.item<double>();
  }

  // Seconds of the slowest rank, or of rank 0 while the others wait: the median, as runs are
  // compared with. All ranks repeat it as often.
  double time_of(const std::function<void()>& work) {
    const bool waits = alone_ && world_.rank() > 0;
    const auto once = [&] {
      comm::barrier(world_).wait();
      const auto start = Clock::now();
      if (waits) return 0.0;
      work();
      finish();
      return seconds_since(start);
    };
    once();
    const double estimate = slowest(once());
    const int count = seconds_ == 0
                          ? 1
                          : static_cast<int>(std::clamp(seconds_ / std::max(estimate, 1e-7),
                                                        1.0 * kSamples, 500.0));
    std::vector<double> samples;
    for (int i = 0; i < count; ++i) samples.push_back(once());
    std::ranges::sort(samples);
    const double median = samples[samples.size() / 2];
    const double spread =
        waits ? 0 : (samples[samples.size() * 3 / 4] - samples[samples.size() / 4]) / median / 2;
    if (estimate > 1e-3) worst_spread_ = std::max(worst_spread_, slowest(spread));
    return slowest(median);
  }

  at::Tensor random(std::vector<int64_t> shape) const {
    return at::randn(shape, at::TensorOptions().dtype(dtype_).device(device_));
  }

  // Time is linear in FLOP above a floor: a large product and a small one.
  void products() {
    const auto product = [&](int64_t rows, int64_t inner, int64_t columns) {
      const at::Tensor a = random({rows, inner}), b = random({inner, columns});
      return std::pair(2.0 * static_cast<double>(rows * inner * columns),
                       time_of([&] { at::mm(a, b); }));
    };
    const bool cuda = device_.is_cuda();
    const auto [flop, seconds] = cuda ? product(4096, 8192, 8192) : product(512, 1024, 1024);
    // As narrow as tensor parallelism makes them.
    const auto [few, floor] = cuda ? product(256, 1024, 1024) : product(256, 256, 32);
    const double per_flop = (seconds - floor) / (flop - few);
    cluster_.device.flops = 1 / std::max(per_flop, 1e-18);
    cluster_.efficiency.product_half =
        std::max(0.0, (floor - few * per_flop) * cluster_.device.flops);
  }

  void memory_bandwidth() {
    const int64_t count = (device_.is_cuda() ? 256 << 20 : 64 << 20) / 4;
    const at::Tensor a = at::zeros({count}, at::TensorOptions().device(device_));
    const at::Tensor b = at::zeros_like(a);
    const double copied = time_of([&] { b.copy_(a); });
    const double added = time_of([&] { b.add_(a); });
    cluster_.device.bandwidth = 20.0 * static_cast<double>(count) / (copied + added);
    cluster_.links.device_link = device_.is_cuda() ? link_bandwidth() : cluster_.device.bandwidth;
  }
  // Each way while both directions are busy.
  double link_bandwidth() {
    const int64_t bytes = 256 << 20;
    const auto pinned = at::TensorOptions().dtype(at::kByte).pinned_memory(true);
    const auto there = at::TensorOptions().dtype(at::kByte).device(device_);
    const at::Tensor in = at::empty({bytes}, pinned), out = at::empty({bytes}, pinned);
    const at::Tensor to = at::empty({bytes}, there), from = at::empty({bytes}, there);
    const c10::impl::VirtualGuardImpl guard(device_.type());
    const c10::Stream current = guard.getStream(device_);
    const c10::Stream other = guard.getStreamFromGlobalPool(device_);
    return static_cast<double>(bytes) / time_of([&] {
             to.copy_(in, /*non_blocking=*/true);
             guard.exchangeStream(other);
             out.copy_(from, /*non_blocking=*/true);
             guard.synchronizeStream(other);
             guard.exchangeStream(current);
           });
  }

  void optimizer() {
    const int64_t count = device_.is_cuda() ? 50'000'000 : 4'000'000;
    at::Tensor parameter = random({count / 1000, 1000}).requires_grad_();
    parameter.mutable_grad() = random({count / 1000, 1000});
    optim::AdamW adamw({{"weight", parameter}});
    const double seconds = time_of([&] { adamw.step(); });
    cluster_.software.optimizer_bytes = seconds * cluster_.device.bandwidth *
                                        cluster_.efficiency.memory / static_cast<double>(count);
  }

  at::TensorOptions tensors() const { return at::TensorOptions().dtype(dtype_).device(device_); }
  // Forward and backward of a block, alone or shared by a group: without what is around it, whose
  // noise a difference would have. On a CPU among so many that caches do not keep their weights.
  double block_time(const WorkSizes& sizes, const Group* sharing = nullptr) {
    const size_t blocks = device_.is_cuda() ? 2 : 8;
    return time_of(block_work(sizes, tensors(), blocks, sharing)) / static_cast<double>(blocks);
  }

  // As plan/ has it with the constants so far.
  plan::LayerTimes planned(const WorkSizes& sizes, int tp = 1) const {
    const plan::ModelShape shape{.layers = 1,
                                 .hidden = sizes.hidden,
                                 .heads = sizes.hidden / 64,
                                 .kv_heads = sizes.hidden / 64,
                                 .head_size = 64,
                                 .ffn = (sizes.hidden * 8 / 3 + 63) / 64 * 64,
                                 .vocab = sizes.vocab,
                                 .gated = true};
    const plan::Layout layout{.dims = {.tp = tp},
                              .sequence = sizes.length,
                              .micro_batch = sizes.batch,
                              .element = dtype_ == at::kBFloat16 ? 2.0 : 4.0};
    return plan::layer_times(shape, layout, cluster_);
  }
  static double whole(const plan::LayerTime& layer) {
    return layer.forward.total() + layer.backward().total();
  }
  // The value of a constant, between two limits, with which a prediction is `seconds`. Predictions
  // fall with it.
  static void solve(double& constant, double low, double high, double seconds,
                    const std::function<double()>& predicted) {
    for (int i = 0; i < 60; ++i) {
      constant = std::sqrt(low * high);
      (predicted() > seconds ? low : high) = constant;
    }
  }

  void blocks() {
    const bool cuda = device_.is_cuda();
    const int64_t hidden = cuda ? 2048 : 256, vocab = cuda ? 32768 : 4096;
    // So little work that the host is the limit.
    const WorkSizes tiny = cuda ? WorkSizes{hidden, vocab, 1, 16} : WorkSizes{64, vocab, 1, 4};
    const WorkSizes wide{hidden, vocab, cuda ? 16 : 4, cuda ? 512 : 256};
    plan::Efficiency& efficiency = cluster_.efficiency;
    efficiency.launch = 0;
    efficiency.attention = 1;
    const double floor = block_time(tiny);
    const double block = block_time(wide);
    if (!cuda) parts_of_block(wide, tiny, floor, block);
    // On a GPU large products of a block are as far from the peak as their sizes make them. On a
    // CPU they are as fast as alone, and all else is slower than memory.
    double& unknown = cuda ? efficiency.product : efficiency.memory;
    solve(unknown, 0.01, 10, block, [&] {
      if (!cuda) {
        cluster_.software.stream_bytes = stream_ * cluster_.device.bandwidth * unknown;
        cluster_.software.accumulate_bytes = gradient_ * cluster_.device.bandwidth * unknown;
      }
      return whole(planned(wide).block);
    });
    if (cuda) {
      const WorkSizes lengthy{hidden, vocab, 1, 8192};
      const double attended = block_time(lengthy);
      solve(efficiency.attention, 0.001, 10, attended,
            [&] { return whole(planned(lengthy).block); });
    }
    const double head = time_of(head_work(wide, tensors()));
    double fewer = 1;  // logits a byte, so that predictions fall with it
    solve(fewer, 1e-4, 10, head, [&] {
      cluster_.software.logit_bytes = 1 / fewer;
      return whole(planned(wide).head);
    });
    if (cuda) efficiency.launch = std::max(0.0, floor / 3);
    if (cuda || cluster_.devices_per_node == 1) return;  // or all ranks have what they need
    alone_ = true;
    efficiency.alone = std::clamp(block_time(wide) / block, 0.1, 1.0);
    efficiency.alone_head = std::clamp(time_of(head_work(wide, tensors())) / head, 0.1, 1.0);
    alone_ = false;
  }

  // What a CPU computes itself, between products: launching operators, norms and residuals, sums of
  // gradients of weights, which do not depend on the tokens, and attention, whose time grows with
  // the length and the heads.
  void parts_of_block(const WorkSizes& wide, const WorkSizes& tiny, double floor, double block) {
    plan::Efficiency& efficiency = cluster_.efficiency;
    efficiency.launch = floor / 3;
    efficiency.launch_adds = true;
    const double elements = static_cast<double>(wide.batch * wide.length * wide.hidden);
    stream_ = std::max(0.0, time_of(stream_work(wide, tensors())) -
                                time_of(stream_work(tiny, tensors()))) /
              3 / elements / static_cast<double>(at::elementSize(dtype_));

    WorkSizes one_row = wide;
    one_row.batch = 1;
    const auto rows = static_cast<double>(wide.batch);
    const double of_weights = (rows * block_time(one_row) - block) / (rows - 1) - floor;
    gradient_ = std::max(0.0, of_weights) / planned(wide).block.parameters;

    WorkSizes longer = wide;
    longer.length *= 4;
    constexpr int64_t kHeads = 4;
    const double few = time_of(attention_work(wide, tensors(), kHeads)),
                 at_length = time_of(attention_work(longer, tensors(), kHeads)),
                 many = time_of(attention_work(longer, tensors(), 2 * kHeads));
    const double tokens = static_cast<double>(wide.batch * wide.length);
    const double of_scores = std::max(0.0, many - at_length) / kHeads;  // of a head in `longer`
    efficiency.score = of_scores / 3 / (4 * tokens * static_cast<double>(longer.length));
    // Per token and position, without the scores. What does not depend on the length is in the rest
    // of the block.
    const double per_position =
        (at_length / 4 - few) / tokens / static_cast<double>(longer.length - wide.length);
    const double of_products =
        std::max(0.05 * per_position, per_position - 3 * kHeads * efficiency.score);
    efficiency.attention = std::clamp(7 * static_cast<double>(wide.hidden) /
                                          (std::max(of_products, 1e-15) * cluster_.device.flops),
                                      0.01, 1.0);
  }

  // The whole world, and groups of 2, 4 ... ranks that all work at the same time.
  void collectives() {
    for (int size = 2; size <= world_.size(); size *= 2) measure_groups(size);
    if ((world_.size() & (world_.size() - 1)) != 0) measure_groups(world_.size());
  }
  void measure_groups(int size) {
    if (world_.size() % size != 0) return;
    const Group group =
        size == world_.size() ? world_ : world_.split(world_.rank() / size, world_.rank());
    const int hosts = static_cast<int>(comm::host_layout(group).hosts.size());
    for (int64_t bytes = 4096; bytes <= (device_.is_cuda() ? 1 << 30 : 64 << 20); bytes *= 16) {
      const int64_t count = bytes / 4 / size * size;
      const auto options =
          at::TensorOptions().device(group.backend() == "nccl" ? device_ : at::Device(at::kCPU));
      const at::Tensor all = at::zeros({count}, options), part = at::zeros({count / size}, options);
      const auto add = [&](Collective op, const std::function<void()>& work) {
        cluster_.links.measured.push_back(
            {op, {size, hosts}, static_cast<double>(bytes), time_of(work)});
      };
      add(Collective::all_reduce, [&] { comm::all_reduce(all, group).wait(); });
      add(Collective::all_gather, [&] { comm::all_gather(all, part, group).wait(); });
      add(Collective::reduce_scatter, [&] { comm::reduce_scatter(part, all, group).wait(); });
    }
  }

  // There and back between neighbours.
  void messages() {
    if (world_.size() < 2) return;
    const auto options =
        at::TensorOptions().device(world_.backend() == "nccl" ? device_ : at::Device(at::kCPU));
    const auto message = [&](int64_t bytes) {
      const at::Tensor buffer = at::zeros({bytes / 4}, options);
      return time_of([&] {
               if (world_.rank() > 1) return;
               const int other = 1 - world_.rank();
               if (world_.rank() == 0) comm::send(buffer, other, world_).wait();
               comm::recv(buffer, other, world_).wait();
               if (world_.rank() == 1) comm::send(buffer, other, world_).wait();
             }) /
             2;
    };
    const double small = message(4096), large = message(4 << 20);
    plan::Links& links = cluster_.links;
    links.host_latency = small;
    links.host_bandwidth = (4 << 20) / std::max(large - small, 1e-9);
  }

  // Blocks that the ranks of a host share: what they take beyond their computation and their
  // collectives, each measured alone, ranks have waited for each other.
  void waiting() {
    const int tp = cluster_.devices_per_node;
    if (tp < 2 || (tp & (tp - 1)) != 0 || world_.size() % tp != 0) return;  // uneven parts
    const Group group =
        tp == world_.size() ? world_ : world_.split(world_.rank() / tp, world_.rank());
    const bool cuda = device_.is_cuda();
    const int64_t unit = 64 * tp;  // a head for each rank at least
    const WorkSizes sizes{((cuda ? 2048 : 256) + unit - 1) / unit * unit, cuda ? 32768 : 4096,
                          cuda ? 16 : 4, cuda ? 512 : 64};
    const plan::LayerTime block = planned(sizes, tp).block;
    // Ranks do not wait for the part that is added for launching.
    const plan::Efficiency& efficiency = cluster_.efficiency;
    const double compute = block.forward.compute + block.backward().compute -
                           (efficiency.launch_adds ? 3 * efficiency.launch : 0);
    const double beyond = block_time(sizes, &group) - whole(block);
    cluster_.software.waiting = std::max(0.0, beyond / compute / std::log2(tp));
  }

  // A product while an all-reduce is in flight: what of the all-reduce it hides, and by how much
  // each slows down.
  void overlap() {
    if (world_.size() < 2) return;
    const int64_t size = device_.is_cuda() ? 8192 : 512;
    const at::Tensor a = random({size, size}), b = random({size, size});
    const auto options =
        at::TensorOptions().device(world_.backend() == "nccl" ? device_ : at::Device(at::kCPU));
    const at::Tensor buffer = at::zeros({device_.is_cuda() ? 64 << 20 : 1 << 20}, options);
    const double product = time_of([&] { at::mm(a, b); });
    const double reduction = time_of([&] { comm::all_reduce(buffer, world_).wait(); });
    const int count = std::max(1, static_cast<int>(std::ceil(2 * reduction / product)));
    const double both = time_of([&] {
      comm::Work work = comm::all_reduce(buffer, world_);
      for (int i = 0; i < count; ++i) at::mm(a, b);
      work.wait();
    });
    cluster_.software.slowdown = std::clamp((both - count * product) / reduction, 0.0, 1.0);
  }

  const Group& world_;
  at::Device device_;
  at::ScalarType dtype_;
  double seconds_;
  plan::Cluster cluster_;
  double worst_spread_ = 0;
  double gradient_ = 0;  // seconds to add that of a weight
  double stream_ = 0;    // seconds of a byte of the stream, of the bytes that one pass has
  bool alone_ = false;   // rank 0 works, the others wait
  int done_ = 0;
};

void write_machine(const config::ClusterFile& file, const std::string& path) {
  namespace fs = std::filesystem;
  const fs::path table = fs::path(path).replace_extension("csv");
  if (fs::path(path).has_parent_path()) fs::create_directories(fs::path(path).parent_path());
  std::ofstream rows(table);
  rows << "op,hosts,ranks,bytes,seconds\n";
  for (const plan::MeasuredCollective& each : file.cluster.links.measured)
    rows << format("{},{},{},{},{}\n", plan::name_of(each.op), each.group.hosts, each.group.ranks,
                   each.bytes, each.seconds);
  std::ofstream text(path);
  text << config::to_toml(file, table.filename().string());
  if (!rows.good() || !text.good())
    throw ConfigError(format("bench machine: {} cannot be written", path));
}

}  // namespace

int bench_machine_rank(const std::vector<std::string>& arguments) {
  std::string backend = "auto", dtype = "auto", output;
  double seconds = 0.5;
  int threads = 0;
  CLI::App app;
  app.add_option("--backend", backend);
  app.add_option("--dtype", dtype);
  app.add_option("--seconds", seconds);
  app.add_option("--threads", threads);
  app.add_option("--output", output)->required();
  if (const auto status = parse(app, "bench machine", "", arguments)) return *status;
  const auto body = [&](const Group& world) {
    config::TrainConfig config;
    const bool cuda = train::choose_device(config, world).is_cuda();
    if (dtype == "bfloat16" || (dtype == "auto" && cuda))
      config.train.dtype = config::Precision::bfloat16;
    train::set_threads(config, world);
    const config::ClusterFile file = MachineBench(world, config, seconds).measure();
    if (world.rank() == 0) write_machine(file, output);
  };
  if (threads > 0) {
    comm::run_threads(threads, body, {.backend = backend});
  } else {
    body(comm::init({.backend = backend}));
  }
  return 0;
}

}  // namespace lockstep::cli
