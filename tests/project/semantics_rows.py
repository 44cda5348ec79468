"""The rows of the API's semantics, and the test files that hold each: kept (K), modernised (M) or
dropped (D). A test's docstring names its row."""

CONSTRUCTION = "policy/worker/test_rollout_worker_construction"
SAMPLING = "policy/sampling/test_sampler"
CALLBACKS = "policy/sampling/test_callbacks"
AHEAD = "policy/worker/test_sample_collection"
AGENTS = "policy/sampling/test_base_env_sampler"
IO = "policy/worker/test_batch_io"
METHODS = "policy/worker/test_rollout_worker_methods"
STATE = "policy/worker/test_state"
RUNNER = "policy/envs/test_env_runner"
RAY = "policy/worker/test_group"
PARALLEL = "policy/algorithms/test_data_parallel"

# row -> (K, M or D; the files whose tests name it)
ROWS = {
    # the episode client and ExternalEnv
    'PolicyClient(address, inference_mode="local", update_interval=10.0, session)': (
        "K",
        ["ingest/client/test_policy_client"],
    ),
    "update_interval": ("M", ["ingest/client/test_local_inference"]),
    "update_policy_weights()": ("M", ["ingest/client/test_policy_client"]),
    "start_episode(episode_id=None, training_enabled=True)": (
        "K",
        ["ingest/client/test_policy_client", "ingest/embedded/test_external_env"],
    ),
    "get_action(episode_id, obs)": (
        "K",
        [
            "ingest/client/test_local_inference",
            "ingest/client/test_policy_client",
            "ingest/client/test_episode_calls",
        ],
    ),
    "log_action(episode_id, obs, action)": (
        "K",
        ["ingest/client/test_policy_client", "ingest/embedded/test_external_env"],
    ),
    "log_returns(episode_id, reward, info=None, multiagent_done_dict=None)": (
        "K",
        [
            "ingest/client/test_policy_client",
            "ingest/embedded/test_external_env",
            "ingest/embedded/test_external_multi_agent_env",
        ],
    ),
    "end_episode(episode_id, obs)": (
        "M",
        ["ingest/embedded/test_external_env", "ingest/embedded/test_external_env_collector"],
    ),
    "unknown id": (
        "K",
        [
            "ingest/client/test_policy_client",
            "ingest/server/test_process",
            "ingest/client/test_episode_calls",
        ],
    ),
    "episodes serial, env thread-safe": (
        "K",
        ["ingest/embedded/test_external_env", "ingest/episodes/test_assembler"],
    ),
    "_finished set": ("M", ["ingest/episodes/test_assembler", "ingest/embedded/test_external_env"]),
    "action wait 300 s, log_action ack wait 60 s": (
        "M",
        ["ingest/embedded/test_external_env", "ingest/client/test_policy_client"],
    ),
    "max_concurrent": ("D", ["ingest/embedded/test_external_env"]),
    "run()": ("K", ["ingest/embedded/test_external_env"]),
    "to_base_env(num_envs)": ("K", ["ingest/embedded/test_external_env"]),
    "poll / send_actions": ("M", ["ingest/embedded/test_external_env"]),
    "missing agent keys": ("K", ["ingest/embedded/test_external_multi_agent_env"]),
    "horizon with ExternalEnv": ("K", ["ingest/embedded/test_external_env"]),
    "local inference thread": (
        "M",
        ["ingest/client/test_local_inference", "ingest/client/test_policy_client"],
    ),
    "command set": ("M", ["ingest/client/test_policy_client", "ingest/server/test_process"]),
    "auto-wrap of real env, RandomEnv from spaces": (
        "M",
        ["ingest/embedded/test_policy_server_input"],
    ),
    "PolicyServerInput(ioctx, address, port, idle_timeout=3.0, max_sample_queue_size=20), next()": (
        "M",
        ["ingest/embedded/test_policy_server_input"],
    ),
    # construction
    "as_remote(num_cpus, num_gpus, memory, object_store_memory, resources)": ("M", [RAY]),
    "env_creator(EnvContext), env_config, worker_index, vector_index, remote": (
        "K",
        [CONSTRUCTION],
    ),
    "policy: class or {id: (cls, obs_space, act_space, config)}": ("K", [CONSTRUCTION]),
    "policy_mapping_fn(agent_id)": ("K", [AGENTS]),
    "policies_to_train": ("K", [AGENTS]),
    "several policies but env not multi-agent": ("K", [CONSTRUCTION]),
    "tf_session_creator, tf paths, import_policy_model_from_h5": ("D", [CONSTRUCTION]),
    "batch_steps / rollout_fragment_length = 100": ("K", [SAMPLING]),
    'batch_mode="truncate_episodes"': ("K", [SAMPLING]),
    'batch_mode="complete_episodes"': ("K", [SAMPLING]),
    "episode_horizon": ("M", [SAMPLING]),
    "soft_horizon": ("K", [SAMPLING]),
    "no_done_at_end": ("K", [SAMPLING, AGENTS]),
    "preprocessor_pref, preprocessors": ("M", [CONSTRUCTION]),
    "observation_filter NoFilter / MeanStdFilter / ConcurrentMeanStdFilter": (
        "K",
        [CONSTRUCTION, "policy/inference/test_filters"],
    ),
    "sync_filters(new) / get_filters(flush_after)": ("K", [METHODS]),
    "clip_rewards": ("M", [SAMPLING]),
    "clip_actions=True": ("K", [SAMPLING]),
    "compress_observations": ("M", [SAMPLING]),
    "callbacks": ("K", [CALLBACKS]),
    "input_creator(ioctx) / output_creator(ioctx)": ("K", [IO]),
    "input_evaluation: is / wis / simulation": ("M", [IO]),
    "sample_async": ("K", [AHEAD]),
    "num_envs, VectorEnv": ("K", [SAMPLING]),
    "remote_worker_envs, remote_env_batch_wait_ms, async_remote_worker_envs": ("M", [SAMPLING]),
    "observation_fn": ("K", [AGENTS]),
    "seed": ("M", [CONSTRUCTION]),
    "monitor_path": ("M", [CONSTRUCTION]),
    "log_dir, log_level, extra_python_environs, fake_sampler": ("K", [CONSTRUCTION]),
    "model_config, policy_config": ("K", [CONSTRUCTION]),
    "EnvRunner(*, config, **kw)": ("K", [RUNNER]),
    "_try_env_reset": ("M", [RUNNER]),
    "_try_env_step": ("M", [RUNNER]),
    "_convert_to_tensor": ("K", [RUNNER]),
    # methods
    "sample()": ("K", [METHODS]),
    "sample_with_count()": ("K", [METHODS]),
    "get_weights(policies=None) / set_weights(weights, global_vars=None)": ("K", [METHODS]),
    "set_global_vars / get_global_vars": ("K", [METHODS]),
    "compute_gradients(samples)": ("K", [METHODS, AGENTS]),
    "apply_gradients(grads)": ("K", [METHODS]),
    "learn_on_batch(samples)": ("K", [METHODS, AGENTS]),
    "sample_and_learn(expected_batch_size, num_sgd_iter, sgd_minibatch_size, standardize_fields)": (
        "K",
        [METHODS],
    ),
    "get_metrics()": ("K", [METHODS]),
    "foreach_env, get_policy (None if unknown), for_policy, foreach_policy(func(policy, pid)), "
    "foreach_trainable_policy": ("K", [METHODS]),
    "save() / restore(bytes)": ("M", [STATE]),
    'export_policy_model(dir), export_policy_checkpoint(dir, prefix="model")': ("K", [STATE]),
    "stop(), __del__": ("K", [METHODS]),
    "creation_args()": ("K", [METHODS]),
    "setup_torch_data_parallel(url, world_rank, world_size, backend)": ("K", [PARALLEL]),
    "get_node_ip(), find_free_port()": ("K", [METHODS]),
    "iterator base (ParallelIteratorWorker)": ("M", [METHODS]),
    "split_by_episode": ("M", [METHODS]),
    "concat_samples / shuffle / slice / rows / columns / copy / compress": ("K", [METHODS]),
}
