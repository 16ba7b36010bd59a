"""`python -m trials.drill`; the same command is `slotkeeper drill`."""

from trials.drill.command import drill

if __name__ == "__main__":
    drill(prog_name="python -m trials.drill")
