-- FlashRecovery's part of a site's cli_filter.lua: what `--flashrecovery` means for sbatch and salloc.
--
--   local flashrec = dofile("/etc/slurm/flashrec_cli_filter.lua")
--   function slurm_cli_pre_submit(options, offset)
--     flashrec.pre_submit(options, offset)
--     ... the site's own rules ...
--     return slurm.SUCCESS
--   end
--
-- Runs in the user's own sbatch, salloc and srun, as the user. It asks Slurm nothing, never refuses a command and
-- leaves alone every srun, every job without the option, and the allocations that `flashrec` itself makes. Nothing is
-- enforced here: a user who gets round it only harms the own job. The grammar of the option is that of
-- docs/reference/plugin-contract.md; the SPANK plugin has refused everything else before we are called.
-- Lua 5.1 to 5.4.

local M = {}

local PLUGIN, OPTION = "flashrecovery", "flashrecovery"

-- The parts of a SPEC that matter for the allocation; nil for what the plugin would refuse.
function M.read_spec(text)
  local spec = { off = text == "off" }
  if spec.off or text == "" or text == "set" or text == "(null)" then -- Slurm's words for an option without a value
    return spec
  end
  for item in (text .. ","):gmatch("([^,]*),") do
    local key, value = item:match("^([a-z-]+)=(.+)$")
    if key == nil then
      return nil
    elseif key == "spares" then
      spec.spares = value:match("^%d+$") and #value <= 6 and tonumber(value) or nil
      if spec.spares == nil then
        return nil
      end
    elseif key == "tier" then
      spec.tier = value
    elseif key == "pool" then
      spec.tier = spec.tier or "pool"
    end
  end
  return spec
end

-- "4" or "4-6" with `spares` more; nil if that cannot be said: not given ("1-0" on 22.05), or a list of sizes.
function M.add_nodes(nodes, spares)
  local least, most = tostring(nodes or ""):match("^(%d+)%-?(%d*)$")
  least, most = tonumber(least), tonumber(most)
  if least == nil or most == 0 then
    return nil
  end
  if most == nil or most == least then
    return string.format("%d", least + spares)
  end
  return string.format("%d-%d", least + spares, most + spares)
end

-- How many tasks there must be so that Slurm leaves the spares in the job (it takes no more nodes than tasks) and
-- every node, spare or not, has room for the same number of them; nil: as it is. On 22.05 "1" may mean "not given".
function M.add_tasks(tasks, per_node, nodes, spares)
  local count, before = tonumber(tasks), tonumber(tostring(nodes):match("^(%d+)$"))
  per_node = tonumber(per_node) or -1
  if count == nil or before == nil or (count < before) or (count == 1 and per_node > 0) then
    return nil
  end
  if count % before ~= 0 then
    return math.max(count, before + spares)
  end
  return count / before * (before + spares)
end

-- How many nodes to add to `nodes` (as the option is written).
function M.spares_wanted(spec, nodes)
  if spec.spares ~= nil then
    return spec.spares
  end
  if spec.tier == "pool" or tostring(nodes or "") == "1" then
    return 0
  end
  return 1
end

local function given(options)
  local plugins = options["spank"]
  local mine = plugins and plugins[PLUGIN]
  return mine and mine[OPTION]
end

-- Made by flashrec itself: the companion job of a running job, or the allocation of a bare srun.
local function is_ours(options)
  if tostring(options["comment"] or ""):match("^flashrec:spare%-for=") then
    return true
  end
  return options["type"] == "salloc" and os.getenv("FLASHREC_HANDED_OVER") ~= nil
end

local function apply(options, offset)
  local command = options["type"]
  if (command ~= "sbatch" and command ~= "salloc") or (offset or 0) ~= 0 then
    return
  end
  local text = given(options)
  if text == nil or is_ours(options) then
    return
  end
  local spec = M.read_spec(text)
  if spec == nil or spec.off then
    return
  end
  options["no-kill"] = "set"
  local spares = M.spares_wanted(spec, options["nodes"])
  if spares == 0 then
    return
  end
  local nodes = M.add_nodes(options["nodes"], spares)
  if nodes ~= nil then
    local tasks = M.add_tasks(options["ntasks"], options["ntasks-per-node"], options["nodes"], spares)
    if tasks ~= nil then
      options["ntasks"] = string.format("%d", tasks)
    end
    options["nodes"] = nodes
  elseif spec.spares ~= nil then
    slurm.log_info("flashrec: no spare nodes were added, because --nodes is not a number of nodes or a range")
  end
end

-- Call it from slurm_cli_pre_submit. Changes `options` in place; whatever goes wrong in here, the command goes on.
function M.pre_submit(options, offset)
  local ok, err = pcall(apply, options, offset)
  if not ok then
    pcall(slurm.log_info, "flashrec: cli_filter: " .. tostring(err))
  end
end

return M
