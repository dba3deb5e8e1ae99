from ebb.deepspeed import names

names.fill(__name__)
