local H = dofile((arg[0]:match("^(.*/)") or "./") .. "harness.lua")

-- pre_submit on `options`, the SPEC given with the option; environment of the test process but for `environ`.
local function submit(options, spec, environ, offset)
  local M = H.load("flashrec_cli_filter.lua")
  options["spank"] = { flashrecovery = { flashrecovery = spec } }
  options["no-kill"] = options["no-kill"] or "unset"
  local getenv = os.getenv
  os.getenv = function(name)
    return (environ or {})[name]
  end
  M.pre_submit(options, offset)
  os.getenv = getenv
  return options
end

local function check(name, options, spec, nodes, no_kill, environ, offset)
  H.case(name, function()
    local after = submit(options, spec, environ, offset)
    H.equal(after["nodes"], nodes, "nodes")
    H.equal(after["no-kill"], no_kill or "set", "no-kill")
  end)
end

check("spares are added", { type = "sbatch", nodes = "4" }, "spares=1", "5")
check("to salloc as well", { type = "salloc", nodes = "4" }, "spares=2", "6")
check("to both ends of a range", { type = "sbatch", nodes = "4-6" }, "spares=1", "5-7")
check("a range of one is a number", { type = "sbatch", nodes = "4-4" }, "spares=1", "5")
check("by default one", { type = "sbatch", nodes = "4" }, "", "5")
check("by default none to a single node", { type = "sbatch", nodes = "1" }, "", "1")
check("but one if asked for", { type = "sbatch", nodes = "1" }, "spares=1", "2")
check("none from a pool", { type = "sbatch", nodes = "4" }, "tier=pool", "4")
check("none from a named pool", { type = "sbatch", nodes = "4" }, "pool=big", "4")
check("hot ones are nodes of the job", { type = "sbatch", nodes = "4" }, "tier=hot", "5")
check("warm ones besides a pool", { type = "sbatch", nodes = "4" }, "spares=1,tier=pool", "5")
check("a named pool with tier=warm has the default", { type = "sbatch", nodes = "4" }, "tier=warm,pool=big", "5")
check("zero is zero", { type = "sbatch", nodes = "4" }, "spares=0", "4")
check("other keys change nothing", { type = "sbatch", nodes = "4" }, "max-swaps=3,config=/a=b/c.yaml", "5")
check("off is off", { type = "sbatch", nodes = "4" }, "off", "4", "unset")
check("without the option", { type = "sbatch", nodes = "4" }, nil, "4", "unset")
check("srun is never touched", { type = "srun", nodes = "4" }, "spares=1", "4", "unset")
check("22.05's form of no --nodes", { type = "sbatch", nodes = "1-0" }, "spares=1", "1-0")
check("no --nodes", { type = "sbatch" }, "spares=1", nil)
check("a list of sizes", { type = "sbatch", nodes = "2,4,8" }, "spares=1", "2,4,8")
check("--no-kill=off is overruled", { type = "sbatch", nodes = "4", ["no-kill"] = "unset" }, "spares=1", "5")
check("further components of a het job", { type = "sbatch", nodes = "4" }, "spares=1", "4", "unset", nil, 1)
check("a companion job inherits the option", { type = "salloc", nodes = "1", comment = "flashrec:spare-for=7" },
  "spares=1", "1", "unset")
check("the allocation of a bare srun is complete", { type = "salloc", nodes = "5" }, "spares=1", "5", "unset",
  { FLASHREC_HANDED_OVER = "1" })
check("a job submitted from inside a rank is a job", { type = "sbatch", nodes = "4" }, "spares=1", "5", "set",
  { FLASHREC_HANDED_OVER = "1" })
check("an option without a value", { type = "sbatch", nodes = "4" }, "set", "5")
check("an inherited option without a value", { type = "sbatch", nodes = "4" }, "(null)", "5")

local function tasks(name, options, spec, wanted)
  H.case(name, function()
    H.equal(submit(options, spec)["ntasks"], wanted, "ntasks")
  end)
end

tasks("tasks grow with the nodes", { type = "sbatch", nodes = "2", ntasks = 4 }, "spares=1", "6")
tasks("or just enough", { type = "sbatch", nodes = "2", ntasks = 3 }, "spares=2", "4")
tasks("not if none were given", { type = "sbatch", nodes = "2", ntasks = 1 }, "spares=1", 1)
tasks("one on one node may have been given", { type = "sbatch", nodes = "1", ntasks = 1, ["ntasks-per-node"] = -2 },
  "spares=1", "2")
tasks("not if given by node", { type = "sbatch", nodes = "1", ntasks = 1, ["ntasks-per-node"] = 8 }, "spares=1", 1)
tasks("not of a range", { type = "sbatch", nodes = "2-4", ntasks = 4 }, "spares=1", 4)
tasks("not without spares", { type = "sbatch", nodes = "2", ntasks = 4 }, "spares=0", 4)

for _, bad in ipairs({ "x", "spares=x", "spares=-1", "spares=1234567", "spares", "spares=1,,tier=warm" }) do
  check("left to the plugin: " .. bad, { type = "sbatch", nodes = "4" }, bad, "4", "unset")
end

H.case("says so when it cannot add", function()
  submit({ type = "sbatch", nodes = "1-0" }, "spares=1")
  H.match(H.said[1], "no spare nodes were added")
end)

H.case("an error in here stops nobody", function()
  local M = H.load("flashrec_cli_filter.lua")
  M.pre_submit(setmetatable({}, { __index = function() error("broken") end }), 0)
  H.match(H.said[1], "broken")
  slurm.log_info = nil
  M.pre_submit(setmetatable({}, { __index = function() error("broken") end }), 0)
end)

H.finish()
