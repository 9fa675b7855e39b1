// SPDX-License-Identifier: Apache-2.0
// All of Lockstep for programs:
//
//   #include "lockstep/lockstep.h"
//
// Every installed header is included here, except those that need the headers of another library:
// comm/backends/mpi/adopt_mpi.h, comm/backends/gloo/adopt_c10d.h and comm/backends/nccl/adopt.h. It
// declares tensors and modules, but includes no module of torch: include those that you use, such
// as <torch/nn/modules/linear.h>, or <torch/torch.h>. A Lockstep that was built without torch
// installs, and this includes, the first half alone.
#pragma once

#include "lockstep/codec/codec.h"
#include "lockstep/config/model/model_spec.h"
#include "lockstep/core/clock.h"
#include "lockstep/core/dtype.h"
#include "lockstep/core/error.h"
#include "lockstep/core/philox.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/core/version.h"
#include "lockstep/data/batch_reader.h"
#include "lockstep/data/corpus.h"
#include "lockstep/data/tokenizer/tokenizer.h"
#include "lockstep/layout/box.h"
#include "lockstep/layout/offload.h"
#include "lockstep/layout/parallel_config.h"
#include "lockstep/layout/placement.h"
#include "lockstep/layout/rank_map.h"
#include "lockstep/layout/tensor_plan.h"

#if __has_include("lockstep/comm/group.h") && !defined(LOCKSTEP_WITHOUT_TORCH)
#include "lockstep/checkpoint/background_saver.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/custom_backend.h"
#include "lockstep/comm/group.h"
#include "lockstep/mesh/distributed_tensor.h"
#include "lockstep/mesh/mesh.h"
#include "lockstep/mesh/model_parallel_context.h"
#include "lockstep/model/language_model.h"
#include "lockstep/nn/dropout.h"
#include "lockstep/nn/embedding.h"
#include "lockstep/nn/init.h"
#include "lockstep/nn/init_model.h"
#include "lockstep/nn/linear.h"
#include "lockstep/nn/loss.h"
#include "lockstep/nn/sync_batch_norm.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/autocast.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/optim/lr_schedule.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/optim/step_guard.h"
#include "lockstep/parallel/data/data_parallel.h"
#include "lockstep/parallel/data/ddp.h"
#include "lockstep/parallel/data/distributed_sampler.h"
#include "lockstep/parallel/offload/offload.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/parallel/recompute/recompute.h"
#include "lockstep/parallel/shard/fully_shard.h"
#include "lockstep/parallel/tensor/tensor.h"
#endif
