"""`python -m app.drill`; the same command is `slotkeeper drill`."""

from app.drill.command import drill

if __name__ == "__main__":
    drill(prog_name="python -m app.drill")
