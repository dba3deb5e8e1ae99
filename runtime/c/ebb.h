/* Ebb for other languages: the engine as C functions, opaque handles and plain structs. docs/c.md
 * explains a trainer line by line.
 *
 *   ebb_world_open           which rank this is
 *   ebb_model_add_...        the model as data: units, parameters, the order of visits
 *   ebb_engine_create        shards, pools, the plan
 *   ebb_step_begin, ebb_scope_open, ebb_scope_close, ebb_step_finish, ebb_step_report
 *
 * The rules of ebb/runtime/engine/engine.h and step.h hold here. Call an engine from any thread,
 * one call at a time. Every rank makes the same calls in the same order. A collective call is one
 * that all ranks make.
 *
 * A function that returns int32_t returns 0, or the code of an error (EBB_INVALID_ARGUMENT ..., the
 * numbers of absl::StatusCode). Functions that return an id return -1 instead. ebb_error() is the
 * text of the error. A null, unknown or destroyed handle is an error, too. The library throws no
 * exception and never ends the process.
 *
 * In structs that begin with struct_size, set struct_size to your sizeof. Fields beyond it have
 * their default. New fields are added only at the end. In options 0 is the default, and a null text
 * means "not given". All elements of an array have the same struct_size. Other structs never
 * change, and neither do the values of enumerations.
 *
 * Threads of the engine call callbacks, several at once. A callback must not call the engine. It
 * returns 0, or another number if it has failed. */
#ifndef EBB_C_H
#define EBB_C_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EBB_ABI 1 /* the major number of the library: libebb.so.1 */

enum {
  EBB_OK = 0,
  EBB_CANCELLED = 1,
  EBB_UNKNOWN = 2,
  EBB_INVALID_ARGUMENT = 3,
  EBB_DEADLINE_EXCEEDED = 4,
  EBB_NOT_FOUND = 5,
  EBB_ALREADY_EXISTS = 6,
  EBB_PERMISSION_DENIED = 7,
  EBB_RESOURCE_EXHAUSTED = 8,
  EBB_FAILED_PRECONDITION = 9,
  EBB_ABORTED = 10,
  EBB_OUT_OF_RANGE = 11,
  EBB_UNIMPLEMENTED = 12,
  EBB_INTERNAL = 13,
  EBB_UNAVAILABLE = 14,
  EBB_DATA_LOSS = 15
};
enum { EBB_FP32 = 0, EBB_BF16 = 1, EBB_FP16 = 2, EBB_INT8 = 3 }; /* dtypes; int8: bytes */
enum { EBB_FORWARD = 0, EBB_BACKWARD = 1, EBB_RECOMPUTE = 2 };   /* kinds of scopes */
enum { EBB_DEVICE = 0, EBB_CPU = 1, EBB_NVME = 2 };              /* tiers */
enum { EBB_MUON_BY_RULE = 0, EBB_MUON_YES = 1, EBB_MUON_NO = 2, EBB_MUON_NOT_BY_RULE = 3 };
enum { EBB_SUM = 0, EBB_MAX = 1, EBB_MIN = 2 }; /* of the tensor ranks */
enum { EBB_READ = 0, EBB_WRITE = 1 };           /* directions */
enum { EBB_LOG_INFO = 0, EBB_LOG_WARNING = 1 };
enum { /* classes of state */
       EBB_PARAMETER = 0,
       EBB_MASTER = 1, /* the fp32 value that is updated; for a frozen parameter its value */
       EBB_GRADIENT = 2,
       EBB_OPTIMIZER = 3,
       EBB_ACTIVATION = 4,
       EBB_GATHER = 5,
       EBB_SECONDARY = 6,
       EBB_STAGING = 7,
       EBB_WORKSPACE = 8,
       EBB_DRIVER = 9,
       EBB_CONTROL = 10
};

typedef struct ebb_world ebb_world;
typedef struct ebb_model ebb_model;
typedef struct ebb_engine ebb_engine;

/* Elements [begin, end) of a parameter, flattened, as fp32. */
typedef int32_t (*ebb_fill)(void* user, int32_t parameter, int64_t begin, int64_t end,
                            float* values);
typedef int32_t (*ebb_sink)(void* user, int32_t parameter, int64_t begin, int64_t end,
                            const float* values);
typedef void (*ebb_log)(void* user, int32_t level, const char* message);

/* ---- the library ---- */

uint32_t ebb_abi(void);        /* EBB_ABI of the library that is loaded */
const char* ebb_version(void); /* "0.1.0" */
const char* ebb_error(void); /* of this thread's last call that failed; valid until its next call */
/* Sends log lines to a function instead of standard error. Any thread calls it, one line at a time.
 * Null: to standard error again. */
void ebb_log_to(ebb_log, void* user);
/* The configuration resolved for `world` ranks, as JSON. All texts are returned in this way: the
 * text, with a 0 at its end, takes at most `capacity` bytes. `needed`, if not null, is set to the
 * bytes that it has. EBB_OUT_OF_RANGE: the text does not fit. */
int32_t ebb_config_resolve(const char* json, int32_t world, char* text, size_t capacity,
                           size_t* needed);

/* ---- the world ---- */

typedef struct {
  uint32_t struct_size;
  double timeout_seconds; /* the longest wait until all ranks have connected; 0: 600 */
} ebb_world_options;
typedef struct {
  uint32_t struct_size;
  int32_t rank, size, local_rank, local_size;
} ebb_world_facts;

/* Connects the ranks that torchrun, mpirun or srun has started; without a launcher there is one
 * rank. Collective. Options may be null. */
int32_t ebb_world_open(const ebb_world_options*, ebb_world**);
/* Engines of the world remain usable. The handle may be null. */
void ebb_world_close(ebb_world*);
int32_t ebb_world_describe(const ebb_world*, ebb_world_facts*);
/* This rank cannot go on. The calls of all other ranks return an error with `why`. */
int32_t ebb_world_fail(ebb_world*, const char* why);

/* ---- the model ---- */

typedef struct {
  uint32_t struct_size;
  int32_t trainable;    /* 0: frozen: stored in its dtype only, and never updated */
  const char* name;     /* unique; the key in checkpoints */
  const char* group;    /* a name in "ebb.parameter_groups" */
  const int64_t* shape; /* `dimensions` numbers; 0 dimensions: a scalar */
  int32_t dimensions;
  int32_t source_dtype;
  /* Initial values, from one of these. `source`: host memory, row-major, which must not change
   * until ebb_engine_create returns. `file` and `tensor`: a tensor of a safetensors file, or of a
   * folder with such files and an index. `fill`: a function of parameter and index alone. */
  const void* source;
  const char *file, *tensor;
  ebb_fill fill;
  void* user; /* NaN from any of them is an error of ebb_engine_create */
  /* The dtype in scopes; has_dtype 0: the configuration's dtype. EBB_INT8: bytes of a frozen
   * parameter, which are never cast; as fp32 they are the numbers 0 to 255. */
  int32_t has_dtype, dtype;
  /* One of the EBB_MUON_..., for configurations with Muon. The group's "use_muon" holds over the
   * rule, and over EBB_MUON_NOT_BY_RULE: for an embedding or an output layer. */
  int32_t matrix_update;
  /* How the tensor ranks of "ebb.mesh" share it, as ebb::Split. `shape` stays that of the whole, and
   * scopes show this rank's block. has_split 0: each of them has all of it. `parts`: sizes along the
   * dimension of what lies fused in it, as of q, k and v; null: one part. `multiple`: a rank's size
   * of each part is a multiple of this one; 0: 1. `sizes`: of a single part, by tensor rank; null:
   * as equal as multiples allow. */
  int32_t has_split, split_dimension;
  const int64_t *split_parts, *split_sizes;
  int32_t split_part_count, split_size_count;
  int64_t split_multiple;
  int32_t sums_gradient; /* without a split: the tensor ranks' gradients are terms of a sum */
  /* `source` has the block of tensor rank block_rank of block_ranks alone. block_ranks 0: it has
   * the whole. */
  int32_t block_rank, block_ranks;
} ebb_parameter;
typedef struct {
  uint32_t struct_size;
  int32_t unit;
  int32_t forward, backward, gradients; /* what the visit has, as in ebb::Visit; usually 1, 1, 1 */
} ebb_visit;
typedef struct {
  int32_t opens; /* 1: a scope opens; 0: it closes */
  int32_t kind;
  int32_t visit;
} ebb_event;

ebb_model* ebb_model_create(void);
void ebb_model_destroy(ebb_model*);
/* These three return the number of what they add, beginning with 0. */
int32_t ebb_model_add_unit(ebb_model*, const char* name, int32_t keep_whole);
int32_t ebb_model_add_parameter(ebb_model*, int32_t unit, const ebb_parameter*);
int32_t ebb_model_add_visit(ebb_model*, const ebb_visit*);
/* Sets ebb::ModelSpec::order. */
int32_t ebb_model_set_order(ebb_model*, const ebb_event*, int32_t events);

typedef struct {
  int32_t state, tier;
  uint64_t predicted, current, peak; /* bytes of this rank */
} ebb_memory_row;

/* The operations of a step, as a table to read; and the memory of a rank. Both need no engine, no
 * device and no other rank. All rows are returned in this way: at most `capacity` rows are written,
 * and `rows` is set to the number that there are. */
int32_t ebb_plan(const ebb_model*, int32_t world, const char* json, char* text, size_t capacity,
                 size_t* needed);
int32_t ebb_predict_memory(const ebb_model*, int32_t world, const char* json, ebb_memory_row*,
                           int32_t capacity, int32_t* rows);

/* ---- the engine ---- */

/* A slice of a parameter that the caller's own optimizer updates (ebb::UpdateSlice). */
typedef struct {
  int32_t parameter;
  int32_t states; /* the length of `state` */
  int64_t begin, end;
  int64_t step; /* of applied updates, from 1 */
  double learning_rate;
  float* master;
  const float* gradient; /* unscaled and clipped */
  float* const* state;   /* in the order of update_states; zero before the first update */
  void*
      stream; /* null: addresses are the host's. Else the device's: enqueue, and wait for nothing */
} ebb_update_slice;
/* Element by element. Called once for each slice of an applied step, by threads of the engine, several
 * at once. */
typedef int32_t (*ebb_update)(void* user, const ebb_update_slice* slice);

typedef struct {
  uint32_t struct_size;
  int32_t threads;      /* on the CPU; 0: the cores of the host divided by its ranks */
  const char* device;   /* "cpu" (0), "cuda", "cuda:1" */
  const char* name;     /* for log lines and swap folders; 0: "engine" */
  void* compute_stream; /* a cudaStream_t of the caller; 0: the engine makes one */
  int32_t initial_values_of_rank_0;
  const char* error; /* null, or the caller's error, perhaps of this rank alone: every rank's. The
                        model is then not looked at */
  ebb_update update; /* null, or an optimizer in place of the configuration's, which has its own
                        weight decay. It may be called until ebb_engine_close */
  void* update_user;
  const char* const* update_states; /* names of its fp32 states */
  int32_t update_state_count;
} ebb_engine_options;
typedef struct {
  void* data; /* the address of the parameter in every scope of the unit */
  int64_t elements;
  int32_t dtype;
  int32_t gradient_dtype; /* -1: frozen */
} ebb_view;

/* Collective. The model may be changed or destroyed afterwards. Options may be null. */
int32_t ebb_engine_create(ebb_world*, const ebb_model*, const char* json, const ebb_engine_options*,
                          ebb_engine**);
/* Collective, between steps. error: this rank's own, null without one. If a rank has one, it is the
 * error of this call on every rank, cut to 440 bytes on the others. It ends an open evaluation, as
 * ebb_evaluation_finish does, which then returns the error on the others. */
int32_t ebb_engine_agree(ebb_engine*, const char* error);
/* Drops the open step, ends threads and closes files. All later calls are errors, except
 * ebb_engine_destroy, which frees the memory. Until then, tensors over it remain readable. */
int32_t ebb_engine_close(ebb_engine*);
void ebb_engine_destroy(ebb_engine*);
/* The unit's parameters in the order in which they were added. Addresses are valid until
 * ebb_engine_suspend or ebb_engine_reorder. */
int32_t ebb_engine_views(ebb_engine*, int32_t unit, ebb_view*, int32_t capacity, int32_t* count);
/* Between steps, on this rank alone: waits until the unit's parameters have the values of the last
 * finished step at the addresses of its views, and sets `is_whole`. 0: the unit is in shards between
 * steps, so it has no values there. They stay until ebb_step_begin. An error after ebb_write, until
 * a step or evaluation has begun. */
int32_t ebb_engine_await_whole(ebb_engine*, int32_t unit, int32_t* is_whole);
/* Collective, between steps: replaces the visits and the order of the model. Without events the
 * order is forward over the visits and its reverse. Ask for views again afterwards. */
int32_t ebb_engine_reorder(ebb_engine*, const ebb_visit*, int32_t visits, const ebb_event*,
                           int32_t events);
/* Collective, between steps. 1: frees the device's memory; 0: takes it again. */
int32_t ebb_engine_suspend(ebb_engine*, int32_t suspended);
int32_t ebb_engine_copy_parameters(ebb_engine*, ebb_engine* from); /* collective */

/* The place of this rank in "ebb.mesh". Data ranks have different samples. Tensor ranks have the same
 * samples, and each has its block of every parameter with a split. */
typedef struct {
  uint32_t struct_size;
  int32_t data_rank, data_ranks, tensor_rank, tensor_ranks;
} ebb_mesh_facts;

int32_t ebb_engine_mesh(ebb_engine*, ebb_mesh_facts*);
/* What kernels say to the other tensor ranks, on the compute stream, as ebb::TensorAxis does: all of
 * them make the same calls in one order. `elements`: of all_reduce's values, else of one block. The
 * error of a collective is the step's. */
int32_t ebb_tensor_all_reduce(ebb_engine*, void* values, int64_t elements, int32_t dtype,
                              int32_t operation);
int32_t ebb_tensor_all_gather(ebb_engine*, const void* block, void* blocks, int64_t elements,
                              int32_t dtype);
int32_t ebb_tensor_reduce_scatter(ebb_engine*, const void* blocks, void* block, int64_t elements,
                                  int32_t dtype);

/* ---- a step ---- */

typedef struct {
  uint32_t struct_size;
  int32_t has_learning_rate, has_weight_decay; /* 0: the configuration's */
  const char* group;                           /* 0: the parameters of no group */
  double learning_rate, weight_decay;
} ebb_group_options;
typedef struct {
  uint32_t struct_size;
  int32_t micro_batches;   /* 0: gradient_accumulation_steps */
  int32_t hold_updates;    /* no update before the end */
  int32_t may_leave_out;   /* a unit without a backward is not an error; its gradient is zero */
  int32_t rates_at_finish; /* ebb_step_finish may have options, also with early updates */
  int32_t group_count;
  const ebb_group_options* groups;
  int32_t has_learning_rate; /* 0: the schedule's */
  double learning_rate;
  double gradient_divisor; /* 0: ranks x micro-batches */
} ebb_step_options;
typedef struct {
  uint32_t struct_size;
  int32_t group_count;
  const ebb_group_options* groups;
  double gradient_scale; /* 0: 1 */
  const char* error;     /* null, or the caller's error, perhaps of this rank alone: every rank's */
} ebb_finish_options;
typedef struct {
  void* data; /* null: frozen */
  int64_t elements;
  int32_t dtype;
  int32_t first; /* 1: the contents are undefined, so write; 0: add */
} ebb_gradient;
typedef struct {
  uint32_t struct_size;
  int32_t applied;
  int64_t step, skipped_steps;
  double loss, gradient_norm, loss_scale, learning_rate;
} ebb_report;

int32_t ebb_step_begin(ebb_engine*, const ebb_step_options*); /* options may be null */
/* A scope of the open evaluation, or else of the open step. Opening waits until the unit's
 * parameters are at the addresses of its views. ebb_step_finish returns the errors of scopes. */
int32_t ebb_scope_open(ebb_engine*, int32_t kind, int32_t unit, int64_t* scope);
int32_t ebb_scope_close(ebb_engine*, int64_t scope);
/* In a backward scope: where to write the gradients of `count` parameters of its unit. */
int32_t ebb_scope_gradients(ebb_engine*, int64_t scope, const int32_t* parameters, int32_t count,
                            ebb_gradient*);
/* Adds the loss of a micro-batch to the open evaluation, or else to the open step: an unscaled fp32
 * scalar on the device. The report has the mean over micro-batches and ranks. */
int32_t ebb_add_loss(ebb_engine*, const void* device_scalar);
/* The loss scale, in `host` and at an address on the device. Either may be null. With fp16, `host`
 * waits for the verdict of the last step. */
int32_t ebb_step_loss_scale(ebb_engine*, float* host, const void** device);
/* With hold_updates: makes the gradients final, so that they can be read. */
int32_t ebb_step_reduce(ebb_engine*);
int32_t ebb_step_finish(ebb_engine*, const ebb_finish_options*); /* options may be null */
/* Drops the open step and its gradients. Does nothing if no step is open. */
int32_t ebb_step_drop(ebb_engine*);
/* Waits for the verdict of the last finished step, and returns it. */
int32_t ebb_step_report(ebb_engine*, ebb_report*);
/* The learning rate that the configuration's schedule gives the next update of a group; null: of
 * the parameters of no group. Waits for the verdict of the last finished step. */
int32_t ebb_scheduled_rate(ebb_engine*, const char* group, double* rate);
int32_t ebb_evaluation_begin(ebb_engine*);
int32_t ebb_evaluation_finish(ebb_engine*, double* loss); /* collective; `loss` may be null */

/* ---- state ---- */

/* Reads or writes this rank's slices, on the calling thread. `state`: EBB_PARAMETER, EBB_MASTER,
 * EBB_GRADIENT, or EBB_OPTIMIZER with the state's name ("exp_avg"). All ranks must write the same
 * arrays. */
int32_t ebb_read(ebb_engine*, int32_t state, const char* name, ebb_sink, void* user);
int32_t ebb_write(ebb_engine*, int32_t state, const char* name, ebb_fill, void* user);
/* The same for one parameter alone. Others are not touched. Gradients: after ebb_step_reduce, which
 * makes them final. */
int32_t ebb_read_parameter(ebb_engine*, int32_t parameter, int32_t state, const char* name,
                           ebb_sink, void* user);
int32_t ebb_write_parameter(ebb_engine*, int32_t parameter, int32_t state, const char* name,
                            ebb_fill, void* user);
/* Collective: gives a whole parameter, in order, to rank `root`, or to all ranks (-1). `state`:
 * EBB_MASTER or EBB_PARAMETER. The second takes what ebb_read_parameter reads. */
int32_t ebb_gather(ebb_engine*, int32_t parameter, int32_t state, int32_t root, ebb_sink,
                   void* user);
int32_t ebb_gather_state(ebb_engine*, int32_t parameter, int32_t state, const char* name,
                         int32_t root, ebb_sink, void* user);

typedef struct {
  uint32_t struct_size;
  int32_t keep;        /* how many of the newest checkpoints to keep; 0: all */
  const void* trainer; /* bytes of the caller; those of rank 0 are saved */
  int64_t trainer_bytes;
  const void* of_this_rank; /* bytes of the caller; those of each rank are saved */
  int64_t of_this_rank_bytes;
  const void* buffers; /* what a model has beside its parameters; those of each rank are saved */
  int64_t buffers_bytes;
} ebb_save_options;
typedef struct {
  uint32_t struct_size;
  int32_t ranks; /* of the run that saved */
  int64_t step;
  const void* trainer; /* valid until the engine's next ebb_load */
  int64_t trainer_bytes;
  const void* of_this_rank; /* null at another number of ranks */
  int64_t of_this_rank_bytes;
  const void* buffers; /* at another number of ranks, those of rank 0 */
  int64_t buffers_bytes;
} ebb_loaded;

/* Collective. `ticket` null: returns when the checkpoint is on the disk. Otherwise it returns as
 * soon as the save has been started, and the save goes on while later steps run. */
int32_t ebb_save(ebb_engine*, const char* folder, const ebb_save_options*, int64_t* ticket);
/* `done` null: waits for the save. Otherwise sets `done` to 1 if the save has ended. If parameters
 * are on NVMe, a save may begin in the next step. Before it has begun, only the thread that called
 * ebb_save may wait: on another thread it is EBB_FAILED_PRECONDITION, because the two threads could
 * wait for each other. */
int32_t ebb_save_wait(ebb_engine*, int64_t ticket, int32_t* done);
typedef struct {
  uint32_t struct_size;
  int32_t without_states; /* loads parameters and masters alone; the run's steps stay as they are */
  int32_t partial;        /* values that the checkpoint lacks stay as they are, and what the model
                             lacks is left out; 0: both are errors */
} ebb_load_options;

/* Collective: loads a checkpoint, or the newest undamaged one of a folder. The last may be null. */
int32_t ebb_load(ebb_engine*, const char* path, ebb_loaded*);
int32_t ebb_load_with(ebb_engine*, const char* path, const ebb_load_options*, ebb_loaded*);
/* Writes the tensors of another program's files as a checkpoint `folder`/step-N. `tensors` is the
 * JSON that `python3 -m ebb.checkpoint PATH` prints of them. Needs no engine. */
int32_t ebb_import_tensors(const char* tensors, const char* folder);

typedef struct {
  int32_t state, tier, direction;
  uint64_t predicted, bytes; /* moved by the last finished step */
} ebb_traffic_row;
typedef struct {
  char operation[24]; /* "gather", "reduce" ... */
  uint64_t predicted, bytes;
} ebb_communication_row;

int32_t ebb_memory(ebb_engine*, ebb_memory_row*, int32_t capacity, int32_t* rows);
int32_t ebb_traffic(ebb_engine*, ebb_traffic_row*, int32_t capacity, int32_t* rows);
int32_t ebb_communication(ebb_engine*, ebb_communication_row*, int32_t capacity, int32_t* rows);

#ifdef __cplusplus
}
#endif
#endif
